"""Candidates are timed as they will run: from a graph, in memory that is given back."""

from __future__ import annotations

from typing import Any

import pytest

from pydtnn.kernels.cuda.engine import REPEATS, Measure, Refused
from pydtnn.kernels.cuda.memory import DeviceMemory
from tests.simulated.cupy import SimulatedCupy

MB = 1 << 20


@pytest.fixture
def xp() -> Any:
    return SimulatedCupy()


def test_a_candidate_runs_once_and_then_from_a_graph(xp):
    x, calls = xp.zeros(1, "float64"), []

    def work() -> None:
        calls.append(xp.cuda.get_current_stream().is_capturing())
        x[...] = x + 1

    with Measure(xp, DeviceMemory(xp)).session() as carry_out:
        for done in range(1, 4):
            carry_out("a", work)
            assert int(x[0]) == 1 + done * REPEATS
    assert calls == [False] + [True] * REPEATS


def test_candidates_see_what_was_enqueued_before_them(xp):
    x, y = xp.zeros(1, "float64"), xp.zeros(1, "float64")
    x[...] = 7

    def work() -> None:
        y[...] = 2 * x

    with Measure(xp, DeviceMemory(xp)).session() as carry_out:
        carry_out("a", work)
    assert float(y[0]) == 14


def test_memory_of_candidates_is_given_back_when_all_are_measured(xp):
    memory = DeviceMemory(xp)
    with Measure(xp, memory).session() as carry_out:
        for name in "ab":
            carry_out(name, lambda: memory.scratch.take(MB).fill(0))
    assert memory.held == memory.scratch.nbytes == 0


@pytest.mark.parametrize("where", ["at once", "in a capture"])
def test_what_fails_is_refused_and_the_next_is_measured(xp, where):
    memory = DeviceMemory(xp)
    x, measure = xp.zeros(1, "float64"), Measure(xp, memory)

    def fails() -> None:
        x[...] = x + 1
        if where == "at once":
            raise Refused("not today")
        if xp.cuda.get_current_stream().is_capturing():
            float(x[0])  # waits, which a graph cannot

    with pytest.raises(Refused, match="not today|cannot be captured"), measure.session() as run:
        run("bad", fails)
    with measure.session() as run:
        run("good", lambda: x.fill(3))
    assert float(x[0]) == 3


def test_nothing_is_touched_where_nothing_is_measured(xp):
    measure = Measure(xp, DeviceMemory(xp))
    with xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with measure.session():
            pass
        stream.end_capture()
