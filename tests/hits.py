"""Record which parts of the library each test executes, and run chosen tests in a given order.

A copy of this file is `sitecustomize` of the copies of the checkout that `tests.executed` makes.
Where it records, each part of a function calls `_hit` with its number. As the processes that a test
starts inherit the variable in which pytest names it, ranks and commands are recorded, too.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import builtins
import os
import zlib
from typing import Any

FOLDER = os.environ.get("PYDTNN_TEST_HITS", "")
"""Where each test has a file with the numbers of the parts that it executes; empty: none."""

CHOSEN = "PYDTNN_TESTS_CHOSEN"
"""The variable that names a file of tests, one a line."""

seen: set[int] = set()
outside = "PYDTNN_TEST_REPORTS" not in os.environ
"""Whether what no test executes is recorded: while tests are collected."""


def file_of(test: str) -> str:
    """Return the name of a test's file."""
    return f"{zlib.crc32(test.encode()):08x}"


def _hit(part: int) -> None:
    if part not in seen:
        seen.add(part)
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if not (test or outside):
            return
        # As nothing stays open, neither forks nor programs that close all files are in the way.
        path = os.path.join(FOLDER, file_of(test))
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(file, part.to_bytes(4, "little"))
        os.close(file)


if FOLDER:
    builtins._hit = _hit  # type: ignore[attr-defined]


def ranks_of(item: Any) -> str:
    """Return the ranks on which a test runs, such as mpi2."""
    return str(item.callspec.params.get("comm")) if hasattr(item, "callspec") else ""


def pytest_runtest_logstart() -> None:
    seen.clear()


def pytest_runtestloop(session: Any) -> bool | None:
    """Run the tests of each file in a process of its own, where others have cached nothing."""
    global outside
    here = os.path.samefile(session.config.rootpath, os.path.dirname(__file__))
    if not (FOLDER and here and outside) or session.testsfailed:
        return None  # or this is a test of pytest's
    outside = False
    units: dict[Any, list[Any]] = {}
    for item in session.items:
        units.setdefault((item.path, ranks_of(item)), []).append(item)
    running: set[int] = set()
    for unit in units.values():
        if len(running) == int(os.environ["PYDTNN_TEST_JOBS"]):
            running.remove(os.wait()[0])
        running.add(process := os.fork())
        if not process:
            try:
                session.items = unit
                for item, following in zip(unit, [*unit[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            finally:
                os._exit(0)
    while running:
        running.remove(os.wait()[0])
    return True


def pytest_runtest_logreport(report: Any) -> None:
    if FOLDER and report.nodeid.startswith("tests/"):
        with open(os.path.join(FOLDER, "reports"), "a") as file:
            file.write(f"{report.duration:.3f} {report.outcome} {report.nodeid}\n")


def pytest_collection_finish(session: Any) -> None:
    if path := os.environ.get(CHOSEN):
        with open(path) as file:
            order = {test: place for place, test in enumerate(file.read().splitlines())}
        chosen = [item for item in session.items if item.nodeid in order]
        session.items[:] = sorted(  # those that a world of MPI runs are the last ones
            chosen, key=lambda item: (ranks_of(item).startswith("mpi"), order[item.nodeid])
        )
