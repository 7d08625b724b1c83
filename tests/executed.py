"""Which tests execute which parts of the library, recorded in a copy of the checkout."""

from __future__ import annotations

import ast
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests import hits

Place = tuple[int, int]
"""Line, from 1, and column, in bytes."""

SHARED = re.compile(r"@(functools\.)?(lru_)?cache\b|scope=|\bahead\b")
"""What is in files some tests of which use what others have made."""

HEADER = re.compile(r"['\"]|from __future__")
"""The statements that remain the first ones of a module."""

HIT = "getattr(__import__('builtins'), '_hit', id)"
"""What records a part; without `tests.hits`, as in a copy that a test makes, nothing does."""

ALONE = "pydtnn/comm/monitor/process.py"
"""A program that Python runs without `sitecustomize`."""

DEFINED = re.compile(r"(from|import|def|class)\b|    \"?\w+\"?,$")
"""Lines of a module that do not use the names in them."""

AT_FIRST = 5
"""Tests of a file that are run before those of others."""

IGNORED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "build", "__pycache__")


class Part(NamedTuple):
    """Statements of a function that follow each other, and are executed together.

    Attributes
    ----------
    name : str
        The qualified name of the function, and a number.
    first : stmt
        The first of the statements.
    begin, end : tuple of int
        Where they are; the first part of a function begins with it.
    """

    name: str
    first: ast.stmt
    begin: Place
    end: Place


def parts(
    node: ast.AST, scope: str = "", numbers: Counter[str] | None = None, inside: bool = False
) -> Iterator[Part]:
    """Yield the parts of the functions below a node: what contains others ends one."""
    numbers = Counter() if numbers is None else numbers
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if function or isinstance(node, ast.ClassDef):
        scope, inside = f"{scope}.{node.name}".strip("."), function
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        body = [one for one in children if isinstance(one, ast.stmt) and inside]
        if function and field == "body":
            body = body[ast.get_docstring(node) is not None :]
        elif field == "orelse" and isinstance(node, ast.If):
            body = body if body and begin_of(body[0])[1] > node.col_offset else []  # no elif
        firsts = [i for i, one in enumerate(body) if i == 0 or is_block(body[i - 1])]
        for i, following in pairwise([*firsts, len(body)]):
            numbers[scope] += 1
            begin = begin_of(node if function and i == 0 else body[i])
            last = body[following - 1]
            end = last.end_lineno or 0, last.end_col_offset or 0
            yield Part(f"{scope}::{numbers[scope]}", body[i], begin, end)
        for child in children:
            if isinstance(child, ast.AST):
                yield from parts(child, scope, numbers, inside)


def is_block(node: ast.stmt) -> bool:
    """Return whether a statement contains others."""
    return isinstance(node, ast.Match) or hasattr(node, "body")


def is_in(node: Any, row: int) -> bool:
    """Return whether a line is one of a statement."""
    return bool(node.lineno <= row <= node.end_lineno)


def begin_of(node: Any) -> Place:
    """Return where a statement begins, or its decorators."""
    first = min(one.lineno for one in (node, *getattr(node, "decorator_list", ())))
    return first, node.col_offset


def instrumented(text: str, numbers: Iterator[int]) -> tuple[str, list[str]]:
    """Return a module each part of which calls `_hit` with its number, and the parts' names."""
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    found = sorted(parts(tree), key=lambda part: begin_of(part.first))
    first = next((one for one in tree.body if not HEADER.match(ast.unparse(one))), None)
    calls = [(begin_of(first), f"_hit = {HIT}\n")] if found else []
    for part in found:
        row, column = begin_of(part.first)
        after = "\n" + " " * column if is_block(part.first) else "; "
        calls.append(((row, column), f"_hit({next(numbers)}){after}"))
    for (row, column), call in reversed(calls):
        lines[row - 1] = lines[row - 1][:column] + call + lines[row - 1][column:]
    return "".join(lines), [part.name for part in found]


def check_out(root: Path, to: Path) -> None:
    """Copy a checkout, of which it shares the compiled extensions, and add `tests.hits`."""
    shutil.copytree(root, to, ignore=IGNORED, copy_function=copy_file)
    shutil.copy(hits.__file__, to / "sitecustomize.py")


def copy_file(file: str | Path, to: str | Path) -> None:
    """Copy a file, which may be edited while mutants run, or link an extension."""
    (os.link if Path(file).suffix == ".so" else shutil.copy2)(file, to)


@contextmanager
def pytest_in(
    folder: Path, arguments: Sequence[str], variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start pytest in a copy of the checkout; end it and what it has started with the block."""
    own = {"PYTHONPATH": str(folder), "PYDTNN_TEST_HITS": "", "PYTEST_PLUGINS": ""}
    environment = {**os.environ, **own, **variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *arguments],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def record(
    root: Path, copy: Path, mark: str, files: Sequence[str], jobs: int
) -> dict[str, tuple[float, list[str]]]:
    """Run tests in a copy of a checkout; return the time and the parts of each one.

    That without a name has what is executed while tests are collected.
    """
    check_out(root, copy)
    names: list[str] = []
    for path in copy.glob("pydtnn/**/*.py"):
        text, found = instrumented(path.read_text(), count(len(names)))
        file = path.relative_to(copy).as_posix()
        names += [f"{file}::{name}" for name in found]
        if file == ALONE:
            module = str(copy / "sitecustomize.py")
            loaded = f"(__import__('runpy').run_path({module!r}), {HIT})[1]"
            text = text.replace(HIT, loaded, 1)
        path.write_text(text)
    folder = copy / "build" / "hits"
    folder.mkdir(parents=True)
    variables = {"PYDTNN_TEST_HITS": str(folder), "PYDTNN_TEST_JOBS": str(jobs)}
    variables["PYTEST_PLUGINS"] = "sitecustomize"  # also on the ranks of tests
    arguments = ["-s", "-p", "no:cacheprovider", "-m", mark, *files]
    with pytest_in(copy, arguments, variables) as process:
        process.wait()
    seconds = Counter({"": 0.0})
    failed = set()
    for line in (folder / "reports").read_text().splitlines():
        duration, outcome, test = line.split(" ", 2)
        seconds[test] += float(duration)
        failed |= {test} if outcome == "failed" else set()
    print(f"{len(seconds) - 1} tests recorded, {len(failed)} failed", *sorted(failed), sep="\n")
    found = {}
    for test in seconds:
        path = folder / hits.file_of(test)
        data = memoryview(path.read_bytes() if path.exists() else b"").cast("I")
        found[test] = round(seconds[test], 3), [names[part] for part in {*data}]
    return found


class Map:
    """The tests that execute each part of the library, and their times.

    Parameters
    ----------
    root : Path
        The checkout.
    path : Path
        The file for what is recorded.
    """

    def __init__(self, root: Path, path: Path) -> None:
        self.root, self.path = root, path
        self.seconds: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.tests: defaultdict[str, set[str]] = defaultdict(set)
        self.within: defaultdict[str, set[str]] = defaultdict(set)
        self.parts: dict[str, list[Part]] = {}

    def update(self, mark: str, among: Sequence[str], copy: Path, jobs: int) -> None:
        """Record test files that are new or have changed, all or some; read what was recorded."""
        recorded: dict[str, Any] = {}
        if self.path.exists():
            recorded = pickle.loads(self.path.read_bytes())
        for file in [file for file in recorded if not (self.root / file).exists()]:
            del recorded[file]
        digests = {
            path.relative_to(self.root).as_posix(): zlib.crc32(path.read_bytes())
            for top in (self.root / name for name in among or ["tests"])
            for path in ([top] if top.is_file() else sorted(top.rglob("test_*.py")))
        }
        old = [file for file in digests if recorded.get(file, [0])[0] != digests[file]]
        if old:
            chosen = old if among or len(old) < len(digests) else []
            recorded.update({file: (digests[file], {}) for file in old})
            for test, (seconds, names) in record(self.root, copy, mark, chosen, jobs).items():
                _, tests = recorded.setdefault(test.partition("::")[0], (0, {}))
                if not test:
                    names = [*{*names, *tests.get("", (0, ()))[1]}]
                tests[test] = seconds, names
            self.path.write_bytes(pickle.dumps(recorded))
        for file, (_, tests) in recorded.items():
            if file:
                self.within[file] = {*tests}
            for test, (seconds, names) in tests.items():
                self.seconds[test], self.weights[test] = seconds, (seconds + 0.01) * len(names)
                for name in names:
                    self.tests[name].add(test)
                    self.tests[name.partition("::")[0]].add(test)

    def of(self, file: str, place: Place) -> list[str]:
        """Return the tests that execute a place in a file of the library, the best ones first.

        These are quick and execute little else. What is executed by the import of its module is
        tested by those that execute a part with a name that it defines, or are in files with it.
        """
        part = self._part_at(file, place)
        found = self.tests[f"{file}::{part}"] if part else {""}
        if "" in found:
            found = found | self._mentioning(file, place[0], part) or self.tests[file]
        found = found - {""}
        files: defaultdict[str, list[str]] = defaultdict(list)
        for test in sorted(found, key=self.weights.__getitem__):
            files[test.partition("::")[0]].append(test)
        first, later = [], []
        for name, tests in files.items():
            if SHARED.search((self.root / name).read_text()):
                tests += sorted(self.within[name] - found)
            first += tests[:AT_FIRST]
            later += tests[AT_FIRST:]
        return first + later

    def _mentioning(self, file: str, row: int, part: str) -> set[str]:
        """Return tests of what has a name that is defined in a line."""
        if part:
            scope = part.partition("::")[0].split(".")
            names = [name for name in scope if not name.startswith("__")][-1:]
        else:
            nodes = ast.walk(ast.parse((self.root / file).read_text()))  # outer ones first
            around = [node for node in nodes if isinstance(node, ast.stmt) and is_in(node, row)]
            names = re.findall(r"\w+", re.split("[:=(]", ast.unparse(around[-1]))[0])
        word = re.compile(rf"\b({'|'.join({*names} - {'class'})})\b")
        found: set[str] = set()
        for path in self.root.glob("pydtnn/**/*.py"):
            other = path.relative_to(self.root).as_posix()
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if (match := word.search(line)) and not DEFINED.match(line):
                    part = self._part_at(other, (number, match.start()))
                    found |= self.tests[f"{other}::{part}" if part else other]
        for name, tests in self.within.items():
            found |= tests if word.search((self.root / name).read_text()) else set()
        return found

    def _part_at(self, file: str, place: Place) -> str:
        if file not in self.parts:
            self.parts[file] = [*parts(ast.parse((self.root / file).read_text()))]
        around = [part for part in self.parts[file] if part.begin <= place < part.end]
        return max(around, key=lambda part: part.begin).name if around else ""
