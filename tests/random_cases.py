"""The fixture `cases`: a test that draws random cases until its time is over.

    @pytest.mark.fuzz("networks")
    def test_fused_networks_equal_plain_ones(cases):
        for case in cases:
            net = random_network(case.rng)
            case.compare(np.testing.assert_allclose, fused(net), plain(net), rtol=1e-9)

Case n draws from a generator that depends on the name of the test and on n alone. A test that fails
names its case, and ``--fuzz-case n`` runs that one again. `make test-all` begins at a number that
differs by the day (``--fuzz-first``). The time of a kind of cases
(``--fuzz-minutes``) is divided evenly among its tests.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

MINUTES = 0.15
"""Time for each kind of cases in a plain `pytest`."""


@dataclass
class Case:
    """One random case.

    Attributes
    ----------
    number : int
    rng : numpy.random.Generator
    comparisons : int
        What has been compared so far.
    """

    number: int
    rng: np.random.Generator
    comparisons: int = 0

    def compare(self, check: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call a function that raises where something is wrong, and count it as a comparison."""
        self.comparisons += 1
        return check(*args, **keywords)


@dataclass
class Cases:
    """The cases of one test: at least one, then further ones until the time is over.

    Attributes
    ----------
    kind, test : str
    seconds : float
    only : int or None
        The one case to run.
    first : int
    """

    kind: str
    test: str
    seconds: float
    only: int | None = None
    first: int = 0
    done: int = 0
    comparisons: int = 0
    current: Case | None = None

    def __iter__(self) -> Iterator[Case]:
        end = time.monotonic() + self.seconds
        number = self.first if self.only is None else self.only
        while True:
            seed = [zlib.crc32(self.test.encode()), number]
            self.current = Case(number, np.random.default_rng(seed))
            yield self.current
            self.done += 1
            self.comparisons += self.current.comparisons
            self.current = None
            if self.only is not None or time.monotonic() >= end:
                return
            number += 1


@dataclass(eq=False)  # plugins are hashed
class Fuzz:
    """The plugin: options, the time of each test, and a summary at the end."""

    tests: Counter[str] = field(default_factory=Counter)
    ended: list[tuple[str, int, int, int]] = field(default_factory=list)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave only the kind of cases that is asked for."""
        wanted = config.getoption("fuzz_kind")
        if wanted is not None:
            kept = [item for item in items if wanted in ("all", kind_of(item))]
            kept = [item for item in kept if kind_of(item) is not None]
            config.hook.pytest_deselected(items=[item for item in items if item not in kept])
            items[:] = kept

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if kind := kind_of(item):
                self.tests[kind] += 1

    def cases(self, request: pytest.FixtureRequest) -> Cases:
        kind, option = kind_of(request.node), request.config.getoption
        if kind is None:
            raise pytest.UsageError(f"{request.node.nodeid}: the fixture cases needs a mark fuzz.")
        return Cases(
            kind,
            request.node.nodeid,
            60 * option("fuzz_minutes") / max(self.tests[kind], 1),
            option("fuzz_case"),
            option("fuzz_first"),
        )

    def pytest_report_header(self, config: pytest.Config) -> str:
        return f"random cases: from --fuzz-first {config.getoption('fuzz_first')}"

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        outcome = yield
        report, cases = outcome.get_result(), getattr(item, "funcargs", {}).get("cases")
        if call.when != "call" or not isinstance(cases, Cases):
            return
        report.random_cases = (cases.kind, cases.done, cases.comparisons, bool(cases.current))
        if report.failed and cases.current:
            report.options = f" --fuzz-case {cases.current.number}"
            again = f"pytest '{item.nodeid}'{report.options}"
            report.sections.append(("random case", f"It failed. Again: {again}"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what was drawn, here or in another process."""
        if hasattr(report, "random_cases"):
            self.ended.append(report.random_cases)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.ended:
            return
        terminalreporter.section("random cases")
        for kind in sorted({kind for kind, *_ in self.ended}):
            done, comparisons, failed = (
                sum(counts)
                for counts in zip(*(n for k, *n in self.ended if k == kind), strict=True)
            )
            terminalreporter.line(
                f"{kind}: {done} cases, {comparisons} comparisons, {failed} failures"
            )


def kind_of(item: pytest.Item) -> str | None:
    """Return the kind of random cases that a test draws, None for other tests."""
    marker = item.get_closest_marker("fuzz")
    return marker.args[0] if marker else None


def add_options(parser: pytest.Parser) -> None:
    """Add the command-line options of random cases."""
    group = parser.getgroup("random cases")
    group.addoption(
        "--fuzz-minutes", type=float, default=MINUTES, help="time for each kind of random cases"
    )
    group.addoption("--fuzz-kind", help="run tests of this kind of random cases only, or of all")
    group.addoption("--fuzz-case", type=int, help="the only random case to run")
    group.addoption("--fuzz-first", type=int, default=0, help="the first random case to run")
