"""Tests that compare times or rates, or wait for real time to pass: ``make measure``.

They run alone, one after the other, and no other test may depend on how fast a machine is. One that
fails is repeated, up to twice: a busy machine is no error of the library. Each file has a budget.
"""

from __future__ import annotations

from collections import Counter

import pytest

BUDGETS = {
    "tests/comm/monitor/test_process.py": 60.0,
    "tests/comm/test_deadlines.py": 30.0,
    "tests/test_waits.py": 90.0,
}
"""Files all of whose tests measure, with the seconds they may take; see `DEFAULT_BUDGET_S`."""

DEFAULT_BUDGET_S = 20.0
"""Seconds for the tests of a file that is not in `BUDGETS`, some of which are marked `measure`."""

MAX_EXCESS = 3
"""So many times its budget a file may take before the run fails: machines differ."""


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests of the files in `BUDGETS`."""
    files = tuple(BUDGETS)
    for item in items:
        if item.nodeid.startswith(files):
            item.add_marker("measure")


class Budgets:
    """Reports the time of each file of a run that selects these tests alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the files, the longest first."""
        terminalreporter.section("seconds, and the budget of each file")
        for file, seconds in self.seconds.most_common():
            budget = BUDGETS.get(file, DEFAULT_BUDGET_S)
            over = "  over its budget" if seconds > budget else ""
            fails = f" by more than {MAX_EXCESS} times: fails" * (seconds > MAX_EXCESS * budget)
            terminalreporter.line(f"{seconds:6.1f} of {budget:3.0f}  {file}{over}{fails}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        over = [
            file
            for file, seconds in self.seconds.items()
            if seconds > MAX_EXCESS * BUDGETS.get(file, DEFAULT_BUDGET_S)
        ]
        if over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
