"""Multi-rank tests in a plain `pytest`: one launch of mpiexec per number of ranks runs them all.

The tests are collected here, run by `pytest` itself inside each world (`World`), and reported
here as if they had run here: a test fails where it fails on any rank. Where a world ends before its
time (a crash, an abort, ranks that wait for ever), the test it was in has failed, and another world
goes on with the next one.

`mpirun -np N python -m pytest -m mpi` runs them in a world of any size. All ranks run the same
tests in the same order and meet after each. There a failure on one rank prints its report and ends
all. For the harness, each rank writes what happened into a file, and the world ends early only
where a failing rank is left alone by the others.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import create_communicator
from pydtnn.utils.launcher import launched
from tests import launch
from tests.checked import Checked
from tests.groups import mpi_ranks

REPORTS = "PYDTNN_TEST_REPORTS"
"""The variable that names the folder for the reports; unset where a person started the world."""

GRACE = 10.0
"""Seconds that a rank whose test has failed waits for the others before it ends them."""

PATIENCE = float(os.environ.get("PYDTNN_TEST_PATIENCE", "300"))
"""Seconds without any progress after which the ranks are killed."""

MAX_LOST = 3
"""Worlds of one size that may end before their time; a fault of all tests would last for hours."""

Reports = list[pytest.TestReport]


@dataclass
class Diary:
    """What one rank wrote: the tests it started and ended, and their reports."""

    started: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    reports: defaultdict[str, Reports] = field(default_factory=lambda: defaultdict(list))


class Harness:
    """The plugin of the process that a person started."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._reports: dict[str, Reports] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the tests of each world together, behind those of this process."""
        items.sort(key=lambda item: mpi_ranks(item) or 0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        ranks = mpi_ranks(item)
        if ranks is None or launch.why_not():
            return None
        if item.nodeid not in self._reports:
            self._run([one for one in item.session.items if mpi_ranks(one) == ranks], ranks)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports[item.nodeid]:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, items: list[pytest.Item], ranks: int) -> None:
        """Run tests on so many ranks, in as many worlds as it takes."""
        ended_early = 0
        while items:
            ended, begun, story = self._run_world(items, ranks)
            self._reports.update(ended)
            items = items[len(ended) :]
            if not items:
                return
            ended_early += 1
            # The test that was under way is lost; all of them where none was, or after some losses.
            victims = items[:1] if begun and ended_early < MAX_LOST else items
            self._reports.update({item.nodeid: [lost(item, story)] for item in victims})
            items = items[len(victims) :]

    def _run_world(
        self, items: Sequence[pytest.Item], ranks: int
    ) -> tuple[dict[str, Reports], bool, str]:
        """Run one world.

        Returns
        -------
        ended : dict
            The merged reports of the tests that all ranks have ended: the first ones of `items`.
        begun : bool
            Whether it began another test.
        story : str
            How the world ended, and what its ranks said.
        """
        with tempfile.TemporaryDirectory(prefix="pydtnn-tests-") as name:
            folder = Path(name)
            (folder / "tests").write_text("".join(f"{item.nodeid}\n" for item in items))
            story = self._launch(folder, ranks)
            diaries = [self._read(folder / f"rank{rank}.jsonl") for rank in range(ranks)]
        ended: dict[str, Reports] = {}
        for test in (item.nodeid for item in items):
            if not all(test in diary.ended for diary in diaries):
                said = [
                    _told(rank, report) + "\n"
                    for rank, diary in enumerate(diaries)
                    for report in diary.reports[test]
                    if report.failed
                ]
                begun = any(test in diary.started for diary in diaries)
                return ended, begun, "".join([*said, story])
            ended[test] = _merge([diary.reports[test] for diary in diaries])
        return ended, False, story

    def _launch(self, folder: Path, ranks: int) -> str:
        """Run the tests listed in `folder`; return how it ended."""
        option = self._config.option
        arguments = ["-m", "pytest", f"@{folder / 'tests'}", f"--rootdir={self._config.rootpath}"]
        arguments += ["-p", "no:cacheprovider", "-o", "addopts=", "--color=no"]
        arguments += [f"--import-mode={option.importmode}"]
        arguments += [f"--tb={option.tbstyle}", *["-v"] * option.verbose]
        if self._config.inipath is not None:
            arguments += ["-c", str(self._config.inipath)]
        environment = {
            REPORTS: str(folder),
            "OMP_NUM_THREADS": "1",  # ranks are more than cores as it is
            # Plugins from elsewhere have no part in this; hypothesis costs each rank 1 s.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        with launch.Program(ranks, arguments, environment, self._config.rootpath) as program:
            size, since = -1, time.monotonic()
            while not program.wait(0.2):
                now = sum(file.stat().st_size for file in folder.iterdir())
                if now != size:
                    size, since = now, time.monotonic()
                elif time.monotonic() - since > PATIENCE:
                    program.kill()
                    how = f"no rank made progress for {PATIENCE:.0f} s, so all were killed"
                    break
            else:
                how = f"mpiexec ended with status {program.finished().returncode}"
            left = program.finished()
        return f"{ranks} ranks: {how}\n--- stderr ---\n{left.stderr}--- stdout ---\n{left.stdout}"

    def _read(self, file: Path) -> Diary:
        """Read what a rank wrote; the last line may be cut where it was killed."""
        diary = Diary()
        for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
            if line.endswith("\n"):
                entry = json.loads(line)
                diary.started.update(filter(None, [entry.get("start")]))
                diary.ended.update(filter(None, [entry.get("end")]))
                if "report" in entry:
                    report = self._config.hook.pytest_report_from_serializable(
                        config=self._config, data=entry["report"]
                    )
                    if isinstance(report.longrepr, list):  # of a skip; JSON has no tuples
                        report.longrepr = tuple(report.longrepr)
                    diary.reports[report.nodeid].append(report)
        return diary


def _told(rank: int, report: pytest.TestReport) -> str:
    """A failure, its rank and reason in the first line, which is the one that summaries show."""
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = crash.message.splitlines()[0] if crash is not None and crash.message else ""
    return f"rank {rank}: {reason}\n{report.longreprtext}"


def _merge(ranks: list[Reports]) -> Reports:
    """One report per phase: a failure of any rank, else a skip of any, else the first rank's."""
    merged = []
    for when in ("setup", "call", "teardown"):
        phase = {
            rank: report
            for rank, reports in enumerate(ranks)
            for report in reports
            if report.when == when
        }
        if not phase:
            continue
        order = {"failed": 0, "skipped": 1, "passed": 2}
        worst = min(phase.values(), key=lambda report: order[report.outcome])
        if worst.failed:
            failed = {rank: report for rank, report in phase.items() if report.failed}
            worst.longrepr = "\n".join(_told(rank, report) for rank, report in failed.items())
            worst.sections = [
                (f"rank {rank}: {title}", text)
                for rank, report in failed.items()
                for title, text in report.sections
            ]
        merged.append(worst)
    return merged


def lost(item: pytest.Item, story: str) -> pytest.TestReport:
    """The report of a test that did not end."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={name: 1 for name in item.keywords},
        outcome="failed",
        longrepr=story,
        when="call",
    )


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
