"""When a time between checkpoints has passed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from unittest.mock import Mock

import pytest

from pydtnn.comm import Communicator, Serial
from pydtnn.training.checkpoint.timer import Timer
from pydtnn.utils import clock
from pydtnn.utils.interval import optimal_interval
from tests.each import each
from tests.small_training import Ticks, spend

HOUR = 3600.0


def due_after(timer: Timer, comm: Communicator, steps: Sequence[float]) -> list[int]:
    """Return after which of some steps, given by their times, the timer is due."""
    found = []
    for number, seconds in enumerate(steps, 1):
        spend(seconds)
        if timer.is_due(comm):
            found.append(number)
            timer.restart()
    return found


@pytest.fixture(autouse=True)
def ticks() -> Iterator[None]:
    with clock.used(Ticks()):
        yield


@each("seconds", [0.5, 1.0, 7.0, 100.0])
def test_equal_steps_are_due_at_the_interval(seconds):
    comm = Mock(wraps=Serial())
    found = due_after(Timer(seconds, HOUR), comm, [1.0] * 500)
    step = max(1, round(seconds))
    assert found == [*range(step, 501, step)]
    assert comm.gather_object.call_count <= (len(found) + 1) * (1 + 2 * math.log2(step))


def test_steps_that_become_slower_delay_a_checkpoint_by_little():
    times = [0.1] * 10 + [2.0] * 100
    (first, *_) = due_after(Timer(100.0, HOUR), Serial(), times)
    assert 100.0 - 1.0 <= sum(times[:first]) < 150.0


@pytest.mark.threads(3)
def test_all_ranks_decide_by_the_clock_of_rank_0(comm):
    with clock.used(Ticks()):
        found = due_after(Timer(5.0, HOUR), comm, [1.0 + comm.rank] * 40)
    assert comm.gather_object(found) == [found] * comm.size
    assert found == [*range(5, 41, 5)]


def test_the_automatic_interval_is_that_of_young_and_daly():
    timer = Timer(None, 24 * HOUR)
    steps = [1.0] * 10
    assert [timer.is_due(Serial()) for _ in steps] == [False] * 9 + [True]
    timer.restart(cost=10.0)
    assert timer.seconds == optimal_interval(10.0, 24 * HOUR)
    timer.restart(cost=1e-9, written=30.0)
    assert timer.seconds == 30.0  # the next one would wait
