"""Draw mutants of the library from its syntax trees, and run the tests: ``make mutants``.

A mutant is the library with one small error: an operator, a constant or a condition is another one,
a statement is missing, or two arguments have changed places. Its name consists of its file,
function and kind, and a number among those of its kind in the function, so that it stays when other
code changes. Those that no test can find are listed with the reason in `EQUIVALENT`.

The tests that execute what has changed (`tests.executed`) run in a copy of the checkout, until one
fails that passes without the mutant; it has survived if all of them pass. Results are appended to a
file: a run that was interrupted continues, and the circle "all" continues with what "fast" has
left.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import json
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.util import cache_from_source
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, NamedTuple

from pydtnn.utils.machine import available_cores
from tests.executed import Map, check_out, copy_file, pytest_in
from tests.hits import CHOSEN

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_suffix(".toml")
CIRCLES = {"fast": "not long and not measure", "all": "long and not measure"}
"""Marks of the tests that each circle adds to those before it."""

ALIVE = "SURVIVED"
"""The result of a mutant that no test has found."""

STOPPED = Event()
"""Ends running tests, as when the user interrupts the program."""

HANG_S, SLOWER = 60, 10
"""A test that lasts so long, and so many times longer than without a mutant, hangs: a kill."""

AT_ONCE = 40
"""Tests that are run first, whose files are imported sooner than those of all."""

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
SYMMETRIC = {"max", "min", "gcd", "lcm", "maximum", "minimum", "add", "multiply", "logaddexp"}
SYMMETRIC |= {"suppress", "array_equal", "shares_memory", "may_share_memory"}


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
            yield "constant", [(node, str(value + 1 if abs(value) < 1000 else 2 * value))]
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


class Runner:
    """Runs tests of mutants in copies of a checkout, so many at a time.

    Parameters
    ----------
    folder : Path
        Where a copy of the checkout is, "clean", and others are made.
    jobs : int
        How many.
    maps : dict of str to Map
        The tests of each circle.
    """

    def __init__(self, folder: Path, jobs: int, maps: Mapping[str, Map]) -> None:
        self.clean, self.maps = folder / "clean", maps
        self.copies: SimpleQueue[Path] = SimpleQueue()
        self.passing: set[str] = set()
        self.failing: list[str] = []
        for job in range(jobs):
            check_out(self.clean, folder / str(job))
            self.copies.put(folder / str(job))

    def __call__(self, name: str, mutant: Mutant, circle: str) -> dict[str, Any]:
        """Return whether tests find the mutant, and which."""
        node = mutant.edits[0][0]
        tests = self.maps[circle].of(mutant.file, (node.lineno, node.col_offset))
        copy = self.copies.get()
        begin, file = time.perf_counter(), copy / mutant.file
        failed: list[str] = []
        try:
            self._replace(file, lambda: file.write_text(mutant.apply(self.clean)[1]))
            for chosen in (tests[:AT_ONCE], tests[AT_ONCE:]):
                failed = failed or self._failed(copy, circle, chosen)
        finally:
            self._replace(file, lambda: copy_file(self.clean / mutant.file, file))
            self.copies.put(copy)
        result = {"mutant": name, "circle": circle, "result": circle if failed else ALIVE}
        seconds = round(time.perf_counter() - begin)
        return {**result, "failed": failed, "tests": len(tests), "seconds": seconds}

    @staticmethod
    def _replace(file: Path, write: Callable[[], object]) -> None:
        file.unlink(missing_ok=True)
        Path(cache_from_source(str(file))).unlink(missing_ok=True)
        write()

    def _failed(self, copy: Path, circle: str, tests: Sequence[str]) -> list[str]:
        """Return tests that fail only with the mutant."""
        limit = HANG_S + SLOWER * max(map(self.maps[circle].seconds.__getitem__, tests), default=0)
        while tests := [test for test in tests if test not in self.failing]:
            passed, failed = run_tests(copy, CIRCLES[circle], tests, limit)
            if passed:
                return []
            # Without names of tests, pytest itself or a process has failed.
            known = failed or tests
            if self.passing >= {*known} or run_tests(self.clean, CIRCLES[circle], known, limit)[0]:
                self.passing |= {*known}
                if not (failed and run_tests(copy, CIRCLES[circle], failed, limit)[0]):
                    return failed or ["crashed or hung"]
                tests = [test for test in tests if test not in failed]  # which failed by chance
                continue
            if not failed:
                raise RuntimeError(f"expected tests that run without mutants, got {tests}")
            self.failing += failed
        return []


def run_tests(
    folder: Path, mark: str, tests: Sequence[str], limit: float
) -> tuple[bool, list[str]]:
    """Run tests in this order until one fails; return whether none did, and that one."""
    cached = folder / "build" / "cache"
    shutil.rmtree(cached, ignore_errors=True)
    cached.mkdir(parents=True)
    (cached / "chosen").write_text("\n".join(tests))
    options = {"cache_dir": cached, "faulthandler_timeout": limit}
    options["faulthandler_exit_on_timeout"] = True
    settings = chain.from_iterable(("-o", f"{name}={value}") for name, value in options.items())
    files = {test.partition("::")[0]: None for test in tests}
    arguments = ["-x", "-p", "sitecustomize", *settings, "-m", mark, *files]
    with pytest_in(folder, arguments, {CHOSEN: str(cached / "chosen")}) as process:
        while (code := process.poll()) is None:
            if STOPPED.wait(0.05):
                raise RuntimeError("tests of mutants are stopped")
    failed = cached / "v" / "cache" / "lastfailed"
    names = [*json.loads(failed.read_text())] if failed.exists() else []
    return code in (0, 5), names  # 5: all of the tests are left out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of mutants; return 1 if fewer are killed than is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=main.__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="mutants; by default some are drawn")
    add("--seed", type=int, default=int(f"{date.today():%Y%m%d}"), help="by default the day")
    add("--count", type=int, default=200, help="mutants to draw (default: %(default)s)")
    add("--circle", choices=CIRCLES, default="fast", help="tests that are run")
    add("--jobs", type=int, default=len(available_cores()), help="mutants at a time")
    add("--tests", nargs="*", default=[], metavar="PATH", help="record these only, not all")
    add("--at-least", type=float, default=90, metavar="PERCENT", help="that are to be killed")
    add("--again", action="store_true", help="run mutants that have survived once more")
    options = parser.parse_args(arguments)

    place = ROOT / "build" / "mutants"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        check_out(ROOT, Path(folder) / "clean")
        return run_all(parser, options, place, Path(folder))


def run_all(
    parser: argparse.ArgumentParser, options: argparse.Namespace, place: Path, folder: Path
) -> int:
    """Run the tests of mutants of the copy in a folder: the checkout may change meanwhile."""
    root = folder / "clean"
    found = mutants(root)
    equivalent = tomllib.loads(EQUIVALENT.read_text())
    drawn = draw([*(found.keys() - equivalent)], options.seed, options.count)
    chosen = options.names or drawn
    if unknown := {*chosen} - found.keys():
        parser.error(f"expected names of mutants, got {', '.join(unknown)}")
    print(f"{len(chosen)} of {len(found)} mutants, seed {options.seed}", flush=True)
    path = place / f"{options.seed}.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    done = {(line["mutant"], line["circle"]): line for line in lines}
    if options.again:
        done = {key: line for key, line in done.items() if line["result"] != ALIVE}

    circles = [*CIRCLES][: [*CIRCLES].index(options.circle) + 1]

    def run(name: str) -> dict[str, Any]:
        for circle in circles:
            if (name, circle) not in done:
                result = done[name, circle] = runner(name, found[name], circle)
                with path.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                text = f"{result['result']:10} {result['seconds']:5} s  {name}"
                print(text, *result["failed"], flush=True)
            if done[name, circle]["result"] != ALIVE:
                break
        return done[name, circle]

    maps = {}
    for circle in circles:
        maps[circle] = Map(root, place / f"map-{circle}.pickle")
        copy = folder / f"recorded-{circle}"
        maps[circle].update(CIRCLES[circle], options.tests, copy, options.jobs)
    runner = Runner(folder, options.jobs, maps)
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            results = [*pool.map(run, chosen)]
        except BaseException:
            STOPPED.set()
            raise
    for result in results:
        if result["result"] == ALIVE:
            name = result["mutant"]
            before, after = (text.splitlines() for text in found[name].apply(root))
            diff = difflib.unified_diff(before, after, name, n=2, lineterm="")
            print("", *diff, sep="\n")
    ends = Counter(result["result"] for result in results)
    print(f"\n{len(results)} mutants:", *(f"{ends[end]} {end}" for end in (*circles, ALIVE)))
    return int(100 * (len(results) - ends[ALIVE]) < options.at_least * len(results))


if __name__ == "__main__":
    sys.exit(main())
