"""Draw mutants of the library from its syntax trees, and run the tests: ``make mutants``.

A mutant is the library with one small error: an operator, a constant or a condition is another one,
a statement is missing, or two arguments have changed places. Its name consists of its file,
function and kind, and a number among those of its kind in the function, so that it stays when other
code changes. Those that no test can find are listed with the reason in `EQUIVALENT`.

Tests run in a copy of the checkout, in the order of `stages`, until one fails that
passes without the mutant. Results are appended to a file: a run that was interrupted continues, and
the circle "all" continues with what "fast" has left.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date
from functools import cache
from importlib.util import cache_from_source
from itertools import chain
from math import inf
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, NamedTuple

from pydtnn.utils.machine import available_cores

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_suffix(".toml")
EXAMPLE = re.compile(r"^ *>>> (?!.*doctest: \+SKIP)", re.M)
"""An example that is executed, as in `tests.test_docstrings`."""

EXAMPLES = "tests/test_docstrings.py::test_examples_have_the_results_that_are_written_below_them"

CIRCLES = {"fast": "not long and not measure", "all": "long and not measure"}
"""Marks of the tests that each circle adds to those before it."""

ALIVE = ("SURVIVED", "UNDECIDED")
"""Results of mutants that no test has found, of the latter within the budget."""

STOPPED = Event()
"""Ends running tests, as when the user interrupts the program."""

HANG_S = 300
"""Time after which a test is one that hangs, which kills the mutant."""

LEFT_OUT = tuple(
    f"pydtnn/{path}" for path in ("kernels/cuda/", "comm/nccl.py", "training/capture.py")
)
"""Code that needs a GPU."""

OTHER: dict[type[ast.AST], type[Any]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.LShift: ast.RShift, ast.RShift: ast.LShift},
    **{ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.BitXor: ast.BitOr},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
}
NEGATED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
"""Comparisons whose other one is their negation."""

SEQUENCES = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple)
"""Operands and arguments that, exchanged, make an error that every test finds."""

# What stays as it is: texts, checks of our own invariants, types, and what is only displayed.
NODES = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
FIELDS = {"annotation", "returns", "decorator_list"}
FUNCTIONS = {"__repr__", "__str__"}
CALLS = {"warn", "debug", "info", "warning", "error", "isinstance", "cast", "TypeVar"}
CONDITIONS = re.compile(r"\b(TYPE_CHECKING|__name__|sys\.platform)\b")
SYMMETRIC = {"max", "min", "gcd", "lcm", "maximum", "minimum", "add", "multiply"}

Edit = tuple[Any, str]
"""A node of a syntax tree and the text that replaces it."""


class Mutant(NamedTuple):
    """A file of the library and what is replaced in it, from top to bottom."""

    file: str
    edits: list[Edit]

    def apply(self, root: Path) -> tuple[str, str]:
        """Return the text of the file, and that with the error."""
        before = (root / self.file).read_text()
        lines, text = [0], before.encode()
        for line in text.splitlines(keepends=True):
            lines.append(lines[-1] + len(line))
        for node, new in reversed(self.edits):
            begin = lines[node.lineno - 1] + node.col_offset
            end = lines[node.end_lineno - 1] + node.end_col_offset
            text = text[:begin] + new.encode() + text[end:]
        return before, text.decode()


def mutants(root: Path, files: str = "pydtnn/**/*.py") -> dict[str, Mutant]:
    """Return all mutants of the library, or of some of its files, by name."""
    found = {}
    for path in sorted(root.glob(files)):
        file = path.relative_to(root).as_posix()
        if not file.startswith(LEFT_OUT):
            numbers: Counter[tuple[str, str]] = Counter()
            for scope, kind, edits in candidates(ast.parse(path.read_text()), "module"):
                numbers[scope, kind] += 1
                found[f"{file}::{scope}::{kind}::{numbers[scope, kind]}"] = Mutant(file, edits)
    return found


def candidates(node: ast.AST, scope: str) -> Iterator[tuple[str, str, list[Edit]]]:
    """Yield the qualified name of the function, kind and edits of each mutant below a node."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            if node.name in FUNCTIONS:
                return
            scope = node.name if scope == "module" else f"{scope}.{node.name}"
        case ast.Call() if name_of(node) in CALLS:
            return
        case ast.If() | ast.IfExp() if CONDITIONS.search(ast.unparse(node.test)):
            return
        case ast.keyword(arg="strict"):
            return
        case ast.Call(args=sizes) if name_of(node) == "reshape":  # of any negative size
            node.args = [size for size in sizes if ast.unparse(size) != "-1"]
        case _ if isinstance(node, NODES):
            return
    for kind, edits in errors(node, scope):
        yield scope, kind, edits
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in FIELDS:
                yield from candidates(child, scope)


def errors(node: ast.AST, scope: str) -> Iterator[tuple[str, list[Edit]]]:
    """Yield the kind and the edits of each mutant at a node."""
    match node:
        case ast.BinOp(op=op) if type(op) in OTHER and not is_sequence(node.left, node.right):
            yield "arithmetic", [changed(node, op=OTHER[type(op)]())]
        case ast.AugAssign(op=op):
            yield "statement", [(node, "pass")]
            if type(op) in OTHER and not is_sequence(node.value):
                yield "arithmetic", [changed(node, op=OTHER[type(op)]())]
        case ast.Compare(ops=ops):
            for i, one in enumerate(ops):
                new = [*ops[:i], OTHER[type(one)](), *ops[i + 1 :]]
                yield "comparison", [changed(node, ops=new)]
        case ast.BoolOp(op=op):
            yield "boolean", [changed(node, op=OTHER[type(op)]())]
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield "unary", [(node, f"({ast.unparse(node.operand)})")]
        case ast.Constant(value=bool(value)):
            yield "constant", [(node, str(not value))]
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", [(node, str(value + 1))]
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield from negated(test)
        case ast.comprehension(ifs=tests):
            yield from chain.from_iterable(map(negated, tests))
        case ast.Expr(value=ast.Call() as call) if name_of(call) not in CALLS:
            yield "statement", [(node, "pass")]
        case ast.Continue() | ast.Break() | ast.Return(value=None):
            yield "statement", [(node, "pass")]
        case ast.Assign(targets=[ast.Subscript()]):
            yield "statement", [(node, "pass")]
        case ast.Assign(targets=[ast.Attribute()]) if not scope.endswith("__init__"):
            yield "statement", [(node, "pass")]
        case ast.Call(args=[first, second, *_]) if name_of(node) not in SYMMETRIC:
            texts = ast.unparse(first), ast.unparse(second)
            starred = any(text.startswith("*") for text in texts)
            if texts[0] != texts[1] and not starred and not is_sequence(first, second):
                yield "arguments", [(first, texts[1]), (second, texts[0])]


def changed(node: Any, **fields: Any) -> Edit:
    """Return the edit that changes fields of a node."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    text = ast.unparse(new)
    return node, text if isinstance(node, ast.stmt) else f"({text})"


def negated(test: ast.expr) -> Iterator[tuple[str, list[Edit]]]:
    """Yield the negation of a condition, unless another mutant is the same."""
    match test:
        case ast.Constant() | ast.UnaryOp(op=ast.Not()):
            return
        case ast.Compare(ops=[op]) if isinstance(op, NEGATED):
            return
    yield "condition", [(test, f"(not ({ast.unparse(test)}))")]


def is_sequence(*operands: ast.expr) -> bool:
    """Return whether an operand is a text or a list."""
    return any(
        isinstance(operand, SEQUENCES)
        or (isinstance(operand, ast.Constant) and isinstance(operand.value, str))
        for operand in operands
    )


def name_of(call: ast.Call) -> str:
    """Return the name of a function that is called, without that of its module or object."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def draw(names: Sequence[str], seed: int, count: int) -> list[str]:
    """Return names by a seed: most of them stay when some are added or removed."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())[
        :count
    ]


def stages(root: Path, name: str) -> dict[str, list[str]]:
    """Return arguments of pytest by stage: the tests that are most likely to find a mutant first.

    They are the examples in its file, the tests of its module or function and the contracts of its
    package, those that import the module, those of its package, and the rest. Those that name its
    class or function most often begin a stage, in the last two after those of its folder and those
    whose imports are nearer to the module.
    """
    file, scope, *_ = name.split("::")
    path = Path(file).relative_to("pydtnn").with_suffix("")
    tests = sorted((root / "tests").rglob("test_*.py"))
    mirror = root / "tests" / path
    topics = "|".join((path.name, *(part.strip("_").lower() for part in scope.split("."))))
    package = root.joinpath("tests", *path.parts[: 1 + (path.parts[0] == "tools")])
    own = [
        test
        for test in tests
        if test.parent == mirror
        or (
            (test.parent == mirror.parent or package in test.parents)
            and re.fullmatch(rf"test_({topics}|contracts)(_\w+)?\.py", test.name)
        )
    ]
    text = (root / file).read_text()
    far = distances(root, file, tests)
    found: dict[str, list[Path]] = {
        "own tests": own,
        "importing": [test for test in tests if far[test] == 1],
        "package": [test for test in tests if test.is_relative_to(package)],
        "rest": tests,
    }

    def order(test: Path) -> tuple[bool, float, int]:
        words = [re.findall(rf"\b{part}\b", test.read_text()) for part in scope.split(".")]
        near = test in own or test.is_relative_to(mirror.parent)
        return not near, (0 if test in own else far[test]), -sum(map(len, words))

    result, before = {}, set()
    for stage, chosen in found.items():
        result[stage] = [
            test.relative_to(root).as_posix() for test in sorted({*chosen} - before, key=order)
        ]
        before |= {*chosen}
    result["own tests"][:0] = [f"{EXAMPLES}[{file}]"] if EXAMPLE.search(text) else []
    return result


def distances(root: Path, file: str, tests: Sequence[Path]) -> dict[Path, float]:
    """Return over how many imports each test reaches a file of the library."""
    far = {}
    left, names = {*root.glob("pydtnn/**/*.py"), *tests}, names_in(root, root / file)
    for distance in range(1, 8):
        nearest = {path for path in left if names & imported(path)}
        far |= dict.fromkeys(nearest, distance)
        left -= nearest
        names = set().union(*(names_in(root, path) for path in nearest if path not in tests))
    return {test: far.get(test, inf) for test in tests}


@cache
def names_in(root: Path, path: Path) -> frozenset[str]:
    """Return the qualified names of a module and of what it defines, also in its packages."""
    module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
    module = module.removesuffix(".__init__")
    parents = [".".join(module.split(".")[:i]) for i in range(1, module.count(".") + 2)]
    body = ast.parse(path.read_text()).body
    defined = [one.name for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef)]
    return frozenset({module, *(f"{parent}.{name}" for parent in parents for name in defined)})


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the qualified names of what a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


class Runner:
    """Runs tests of mutants in copies of a checkout, so many at a time.

    Parameters
    ----------
    root : Path
        The checkout.
    folder : Path
        Where the copies are made, in the same file system.
    jobs : int
        How many.
    budget : float
        Seconds for the tests of a mutant that are not of its module.
    """

    def __init__(self, root: Path, folder: Path, jobs: int, budget: float) -> None:
        self.clean, self.budget = folder / "clean", budget
        self.copies: SimpleQueue[Path] = SimpleQueue()
        self.passing: set[str] = set()
        self.failing: list[str] = []
        for name in ("clean", *map(str, range(jobs))):
            ignored = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "build", "__pycache__")
            shutil.copytree(root, folder / name, ignore=ignored, copy_function=_copy)
            if name != "clean":
                self.copies.put(folder / name)

    def __call__(self, name: str, mutant: Mutant, circle: str) -> dict[str, Any]:
        """Return the stage whose tests find the mutant, or one of `ALIVE`, and what fails."""
        copy = self.copies.get()
        begin, file = time.perf_counter(), copy / mutant.file
        result, failed, end = "SURVIVED", None, inf
        try:
            self._replace(file, lambda: file.write_text(mutant.apply(self.clean)[1]))
            for stage, paths in stages(self.clean, name).items():
                if stage != "own tests" and end == inf:
                    end = time.monotonic() + self.budget
                failed = self._failed(copy, CIRCLES[circle], paths, end) if paths else []
                if failed != []:
                    result = "UNDECIDED" if failed is None else stage
                    break
        finally:
            self._replace(file, lambda: _copy(self.clean / mutant.file, file))
            self.copies.put(copy)
        seconds = round(time.perf_counter() - begin)
        return dict(mutant=name, circle=circle, result=result, failed=failed, seconds=seconds)

    @staticmethod
    def _replace(file: Path, write: Callable[[], object]) -> None:
        file.unlink(missing_ok=True)
        Path(cache_from_source(str(file))).unlink(missing_ok=True)
        write()

    def _failed(self, copy: Path, mark: str, paths: list[str], end: float) -> list[str] | None:
        """Return the tests that fail only with the mutant, None if there was no time for all."""
        while True:
            left_out = [f"--deselect={test}" for test in self.failing]
            code, failed, output = run_tests(copy, ["-m", mark, *paths, *left_out], end)
            if code is None:
                return None
            if code in (0, 5):  # 5: all of the tests are left out
                return []
            # Without names of tests, pytest itself or a process has failed.
            known = {*(failed or ["collected"])}
            if not known <= self.passing:
                again = ["-m", mark, *(failed or ["--collect-only", *paths])]
                if run_tests(self.clean, again)[0] in (0, 5):
                    self.passing |= known
                elif failed and known.isdisjoint(self.failing):
                    self.failing += failed
                    continue
                else:
                    raise RuntimeError(f"expected tests that run without mutants, got\n{output}")
            return failed or ["crashed or hung"]


def _copy(file: str | Path, to: str | Path) -> None:
    """Copy a file, which may be edited while mutants run, or link an extension."""
    (os.link if Path(file).suffix == ".so" else shutil.copy2)(file, to)


def run_tests(
    folder: Path, arguments: Sequence[str], end: float = inf
) -> tuple[int | None, list[str], str]:
    """Run tests until one fails; return the status (None: no time is left), it, and the output."""
    cached = folder / "build" / "cache"
    shutil.rmtree(cached, ignore_errors=True)
    options = {"cache_dir": cached, "faulthandler_timeout": HANG_S}
    options["faulthandler_exit_on_timeout"] = True
    settings = chain.from_iterable(("-o", f"{name}={value}") for name, value in options.items())
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", *settings, *arguments],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            while (code := process.poll()) is None and time.monotonic() < end:
                if STOPPED.wait(0.05):
                    raise RuntimeError("tests of mutants are stopped")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    failed = cached / "v" / "cache" / "lastfailed"
    return code, [*json.loads(failed.read_text())] if failed.exists() else [], text


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table: for each package, how many mutants are killed by which tests."""
    names = ["own tests", "importing", "package", "rest"]
    yield f"{'package':16}{'mutants':>9}{'killed':>8}" + "".join(f"{name:>11}" for name in names)
    packages = [re.sub(r"^pydtnn/(\w+).*", r"\1", result["mutant"]) for result in results]
    for package in (*sorted({*packages}), "all"):
        ends = [
            result["result"]
            for result, its in zip(results, packages, strict=True)
            if package in (its, "all")
        ]
        numbers = "".join(f"{ends.count(name):11}" for name in names)
        rate = sum(end not in ALIVE for end in ends) / len(ends)
        yield f"{package:16}{len(ends):9}{rate:8.0%}{numbers}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of mutants; return 1 if fewer are killed than is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=main.__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="mutants; by default some are drawn")
    add("--seed", type=int, default=int(f"{date.today():%Y%m%d}"), help="by default the day")
    add("--count", type=int, default=200, help="mutants to draw (default: %(default)s)")
    add("--circle", choices=CIRCLES, default="fast", help="tests that are run")
    add("--jobs", type=int, default=len(available_cores()), help="mutants at a time")
    add("--budget", type=float, default=1800, metavar="SECONDS", help="for tests of other modules")
    add("--at-least", type=float, default=90, metavar="PERCENT", help="that are to be killed")
    add("--results", type=Path, help="by default build/mutants/SEED.jsonl")
    add("--again", action="store_true", help="run mutants that have survived once more")
    options = parser.parse_args(arguments)

    found = mutants(ROOT)
    equivalent = tomllib.loads(EQUIVALENT.read_text())
    drawn = draw([*(found.keys() - equivalent)], options.seed, options.count)
    chosen = options.names or drawn
    if unknown := {*chosen} - found.keys():
        parser.error(f"expected names of mutants, got {', '.join(unknown)}")
    print(f"{len(chosen)} of {len(found)} mutants, seed {options.seed}", flush=True)
    place = ROOT / "build" / "mutants"
    place.mkdir(parents=True, exist_ok=True)
    path = options.results or place / f"{options.seed}.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    done = {(line["mutant"], line["circle"]): line for line in lines}
    if options.again:
        done = {key: line for key, line in done.items() if line["result"] not in ALIVE}

    def run(name: str) -> dict[str, Any]:
        for circle in [*CIRCLES][: [*CIRCLES].index(options.circle) + 1]:
            if (name, circle) not in done:
                result = done[name, circle] = runner(name, found[name], circle)
                with path.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                text = f"{result['result']:10} {result['seconds']:5} s  {name}"
                print(text, *result["failed"] or (), flush=True)
            if done[name, circle]["result"] not in ALIVE:
                break
        return done[name, circle]

    with tempfile.TemporaryDirectory(dir=place) as folder:
        runner = Runner(ROOT, Path(folder), options.jobs, options.budget)
        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                results = [*pool.map(run, chosen)]
            except BaseException:
                STOPPED.set()
                raise
        for result in results:
            if result["result"] in ALIVE:
                name = result["mutant"]
                before, after = (text.splitlines() for text in found[name].apply(runner.clean))
                diff = difflib.unified_diff(before, after, name, n=2, lineterm="")
                print("", *diff, sep="\n")
    print("", *table(results), sep="\n")
    killed = 100 * sum(result["result"] not in ALIVE for result in results) / len(results)
    return int(killed < options.at_least)


if __name__ == "__main__":
    sys.exit(main())
