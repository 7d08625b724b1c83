"""Run tests in five processes: ``python -m tests.side_by_side -m "not long"``.

Most tests use one core, and those that start ranks often wait. The process that has collected forks
the others, gives each of them the tests of one file at a time, and reports what they send back as
if it had run here. Arguments are those of pytest.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from tests.groups import mpi_ranks
from tests.mpi_harness import lost

AT_ONCE = 5

MAX_REPORTED = 7
"""Failed tests whose commands are the last lines that are printed."""


class SideBySide:
    """The plugin of the process that collects and reports.

    Attributes
    ----------
    failed : dict of str to str
        Tests that failed, and files with errors, and the options that repeat them.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # as pytest does
        session.config._tmp_path_factory.getbasetemp()  # one for all
        circles: list[dict[int, pytest.Item]] = [{}, {}]  # what is long is last
        for index, item in enumerate(session.items):
            circles[item.get_closest_marker("long") is not None][index] = item
        for circle, which in zip(circles, ("not long", "long"), strict=True):
            if circle and not session.testsfailed:
                self._run(session, deque(units_of(circle)))
                print(f"\n{which}: {len(circle)} tests, {session.testsfailed} failed")
        return True

    def _run(self, session: pytest.Session, units: deque[list[int]]) -> None:
        workers: dict[Connection, Worker] = {}
        sides = [n % 2 == 0 for n in range(min(AT_ONCE, len(units)))]
        try:
            while sides or workers:
                while sides:  # also in place of a process that was lost
                    worker = Worker(session, units, first=sides.pop())
                    workers[worker.connection] = worker
                for connection in wait([*workers]):
                    worker = workers[connection]
                    if not worker.receive():
                        del workers[worker.connection]
                        if worker.given:
                            units.extend(filter(None, [worker.abandon()]))
                            sides.append(worker.first)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
            if units:
                raise RuntimeError("the processes that run tests have ended before them")
        finally:  # what still runs ends with its test, when it cannot send
            for connection in workers:  # all first: a process holds those of earlier ones, too
                connection.close()
            for worker in workers.values():
                worker.join()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.setdefault(report.nodeid, getattr(report, "options", ""))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = ""


def units_of(items: Mapping[int, pytest.Item]) -> list[list[int]]:
    """Indices of tests that one process runs: of a file, or on as many MPI ranks.

    First are those that start other processes, which last longest.
    """
    units: dict[object, list[int]] = {}
    for index, item in items.items():
        units.setdefault(mpi_ranks(item) or item.path, []).append(index)

    def starts(unit: list[int]) -> bool:
        first = items[unit[0]]
        fixtures = {name for i in unit for name in getattr(items[i], "fixturenames", ())}
        return bool(mpi_ranks(first) or fixtures & {"ahead", "mpiexec"})

    return sorted(units.values(), key=lambda unit: not starts(unit))


class Worker:
    """A process that runs tests, seen from the one that reports them.

    Parameters
    ----------
    units : deque
        Of which each process takes one after the other.
    first : bool
        Whether it takes the first ones, not the last ones: some of the processes are to run tests
        that start other processes, and some of them others.

    Attributes
    ----------
    given : deque
        Its tests that have not ended.
    """

    def __init__(self, session: pytest.Session, units: deque[list[int]], *, first: bool) -> None:
        self._session, self._units, self.first = session, units, first
        self.given: deque[int] = deque()
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=work, args=(session, self.connection, theirs))
        self._process.start()
        theirs.close()

    def receive(self) -> bool:
        """Handle what it sent: an ended test, or its wish for others; False where it has ended."""
        try:
            ended = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return False
        if ended is None:
            unit = (self._units.popleft if self.first else self._units.pop)() if self._units else []
            self.given.extend(unit)
            self.connection.send(unit)
            return True
        item = self._session.items[self.given.popleft()]
        for report in ended:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def abandon(self) -> list[int]:
        """Report the test that a lost process ran as failed; return those that it had left."""
        item = self._session.items[self.given.popleft()]
        how = f"the process that ran it ended with status {self._process.exitcode}"
        item.ihook.pytest_runtest_logreport(report=lost(item, how))
        return [*self.given]

    def join(self) -> None:
        self._process.join()


def work(session: pytest.Session, theirs: Connection, connection: Connection) -> None:
    """Run tests as they come, in the process of a `Worker`."""
    theirs.close()
    manager = session.config.pluginmanager
    capture = manager.get_plugin("capturemanager")
    if capture is not None:  # the file into which all processes would write
        capture.stop_global_capturing()
        capture.start_global_capturing()
    manager.unregister(name="terminalreporter")
    reports: list[pytest.TestReport] = []
    manager.register(Reports(reports))
    items, session.items = session.items, []  # those of this process, as fixtures see them
    try:
        for item, following in pairwise(chain(_received(connection, items, session.items), [None])):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(reports)
            reports.clear()
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the other process has stopped, too


def _received(
    connection: Connection, items: Sequence[pytest.Item], own: list[pytest.Item]
) -> Iterator[Any]:
    """The tests that this process is given: it asks before it runs the last one that it has."""
    connection.send(None)
    while unit := connection.recv():
        tests = [items[index] for index in unit]
        own.extend(tests)
        yield from tests
        connection.send(None)


class Reports:
    """The plugin of a process that runs tests."""

    def __init__(self, reports: list[pytest.TestReport]) -> None:
        self._reports = reports

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)


def show(failed: Mapping[str, str]) -> None:
    """Print the commands that repeat tests that failed."""
    python = os.path.relpath(sys.executable)
    for test, options in [*failed.items()][:MAX_REPORTED]:
        print(f"failed: {python} -m pytest {shlex.quote(test)}{options}")
    if len(failed) > MAX_REPORTED:
        print(f"failed: {len(failed) - MAX_REPORTED} other tests")


def main(arguments: Iterable[str]) -> int:
    """Run tests with these arguments of pytest; return its exit status."""
    # Tests start hundreds of processes, and compiling what each imports takes a second.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    plugin = SideBySide()
    status = pytest.main([*arguments], plugins=[plugin])
    show(plugin.failed)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
