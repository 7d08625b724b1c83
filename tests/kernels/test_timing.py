"""Timing candidates, with a clock that only they move and a machine that disturbs at will."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest

from pydtnn.kernels.autotuner import BUDGET, MAX_MEASUREMENT_S, ROUNDS, shortest_times, switches

BOTH = ("direct", "other")


class Machine:
    """Candidates take the given times, one after another; some calls lose a core."""

    def __init__(self, disturbed: Callable[[int], bool] = lambda call: False, **seconds: list):
        self.disturbed, self.seconds = disturbed, seconds
        self.now, self.lost = 0.0, 0
        self.order: list[str] = []

    def run(self, name: str) -> None:
        times = self.seconds[name]
        self.now += times[self.order.count(name) % len(times)]
        self.order.append(name)
        self.lost += self.disturbed(len(self.order))

    def times(self) -> dict[str, float]:
        return shortest_times(tuple(self.seconds), self.run, lambda: self.now, lambda: self.lost)


def test_the_shortest_time_of_each_counts() -> None:
    times = Machine(direct=[1.0], other=[0.9, 5.0, 0.5, 0.7]).times()
    assert times == pytest.approx({"direct": 1.0, "other": 0.5})


def test_the_first_call_of_a_candidate_is_not_counted() -> None:
    times = Machine(direct=[1.0], other=[0.01, 2.0, 2.0, 2.0]).times()
    assert times == pytest.approx({"direct": 1.0, "other": 2.0})


def test_candidates_take_turns_so_that_a_slow_moment_hits_all_of_them() -> None:
    machine = Machine(direct=[1.0], other=[0.5])
    machine.times()
    assert machine.order == [*BOTH] * (1 + ROUNDS[0])


@pytest.mark.parametrize(
    ("seconds", "rounds"), [(BUDGET, ROUNDS[0]), (BUDGET / 15, 8), (BUDGET / 1e4, ROUNDS[1])]
)
def test_measuring_ends_with_its_budget_but_not_before_it_knows(
    seconds: float, rounds: int
) -> None:
    machine = Machine(direct=[seconds], other=[seconds])
    machine.times()
    assert machine.order.count("direct") == 1 + rounds


def test_calls_that_lost_a_core_do_not_count() -> None:
    """The quick ones among the calls of "other" are those that are disturbed."""
    machine = Machine(lambda call: call % 4 == 0, direct=[0.01], other=[0.02, 0.001])
    assert machine.times() == pytest.approx({"direct": 0.01, "other": 0.02})


def test_a_disturbed_candidate_is_tried_for_longer_but_not_for_ever() -> None:
    seconds = BUDGET / 5
    late = Machine(lambda call: call < 20, direct=[seconds], other=[seconds])
    assert late.times() == pytest.approx({"direct": seconds, "other": seconds})
    never = Machine(lambda call: call % 2 == 0, direct=[seconds], other=[seconds])
    assert never.times() == {"direct": pytest.approx(seconds), "other": math.inf}
    assert never.now == pytest.approx(MAX_MEASUREMENT_S + 2 * seconds, abs=2 * seconds)


def test_switches_never_become_fewer() -> None:
    before = switches()
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        pass
    assert switches() >= before >= 0
