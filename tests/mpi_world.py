"""Tests inside an MPI world: `mpirun -np N python -m pytest -m mpi`, or what `mpi_harness` starts.

All ranks run the same tests in the same order and meet after each. By itself, a failure on one
rank prints its report and ends all ranks. For the harness, each rank writes what happened into a
file, and the world ends early only where a failing rank is left alone by the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import create_communicator
from pydtnn.comm.wrapper import Checked
from pydtnn.utils.launcher import launched
from tests.groups import mpi_ranks

REPORTS = "PYDTNN_TEST_REPORTS"
"""The variable that names the folder for the reports; unset where a person started the world."""

GRACE = 10.0
"""Seconds that a rank whose test has failed waits for the others before it ends them."""


class World:
    """The plugin of one rank.

    Attributes
    ----------
    comm : Communicator
        For the tests; a fresh one after each failure, whose messages may still be on their way. It
        compares the calls of all ranks.
    plain : Communicator
        The one inside.
    size : int
        Number of ranks.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._meeting = create_communicator("mpi")
        self.size = self._meeting.size
        self._split()
        self._failed = False
        self._file = None
        folder = os.environ.get(REPORTS)
        if folder:
            self._file = (Path(folder) / f"rank{self._meeting.rank}.jsonl").open("w", buffering=1)
        if self._meeting.rank > 0:  # one rank talks; the others do so by their failures
            config.pluginmanager.unregister(name="terminalreporter")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what is not for this world: every rank would do the same."""
        others = [item for item in items if mpi_ranks(item) != self.size]
        items[:] = [item for item in items if mpi_ranks(item) == self.size]
        self._config.hook.pytest_deselected(items=others)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse to begin where ranks have collected different tests: they would deadlock."""
        collected = [[item.nodeid for item in session.items], session.testsfailed]
        if any(other != collected for other in self._meeting.gather_object(collected)):
            self._end("the ranks have collected different tests")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._failed = False
        self._write(start=item.nodeid)
        result = yield
        failed = np.array([self._failed], np.int32)
        request = self._meeting.iallreduce(failed, "max")
        deadline = time.monotonic() + GRACE
        while not request.test():
            if self._failed and time.monotonic() > deadline:
                self._end(f"{item.nodeid} has failed here, and other ranks have not ended it")
            time.sleep(0.0005)
        self._write(end=item.nodeid)
        if failed[0]:
            self._split()
        return result

    def _split(self) -> None:
        self.plain = self._meeting.split(0)
        self.comm = Checked(self.plain)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._write(report=data)
        if report.failed and self._file is None:
            self._end(f"{report.nodeid} failed ({report.when})", f"{report.longreprtext}\n")

    def pytest_internalerror(self, excrepr: Any) -> None:
        self._end("internal error of pytest", f"{excrepr}\n")

    def _write(self, **line: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")

    def _end(self, reason: str, details: str = "") -> None:
        """End all ranks as any uncaught error does, after the details."""
        sys.stderr.write(details)
        error = ValueError(reason)
        sys.excepthook(type(error), error, None)
        self._meeting.abort(1)  # with one rank, the hook leaves this to the interpreter


def join_world(config: pytest.Config) -> World | None:
    """Join the world where an MPI launcher started this process."""
    return World(config) if launched() else None
