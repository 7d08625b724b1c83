"""Loops that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pydtnn import Model
from pydtnn.layers import Linear, Sequential
from pydtnn.layers.collectives import Pending, Sum
from pydtnn.model.execution import CollectiveCall, Loop, run_together

NODE: Any = Model(Sequential(Linear(1)), (1,)).graph.nodes[1]


def loop(start: float, told: list[float]) -> Loop:
    """Contribute twice, and return what it made of the totals."""
    first = (yield NODE, Sum(np.array([start]), ())).wait()
    told.append(first[0])
    second = (yield NODE, Sum(first + start, ())).wait()
    told.append(second[0])
    return start


def test_each_loop_is_sent_the_total_of_all() -> None:
    told: list[list[float]] = [[], [], []]
    loops = [loop(start, told[start]) for start in range(3)]
    seen: list[list[float]] = []

    def total(calls: Sequence[CollectiveCall]) -> list[Pending]:
        arrays = [op.array for _, op in calls if isinstance(op, Sum)]
        seen.append([float(a[0]) for a in arrays])
        return [Pending(None, lambda: sum(arrays, np.zeros(1)))] * len(calls)

    assert run_together(loops, total) == [0, 1, 2]
    assert seen == [[0, 1, 2], [3, 4, 5]]
    assert told == [[3, 12]] * 3


def test_the_loop_that_continues_is_announced() -> None:
    order: list[int] = []
    loops = [loop(start, []) for start in range(2)]
    run_together(
        loops, lambda calls: [Pending(None, lambda: np.zeros(1))] * len(calls), order.append
    )
    assert order == [0, 1, 0, 1, 0, 1]


def test_loops_that_never_stop_run_one_after_the_other() -> None:
    order: list[str] = []

    def silent(name: str) -> Loop:
        order.append(name)
        return name
        yield  # makes it a generator

    assert run_together([silent("a"), silent("b")], None) == ["a", "b"]
    assert order == ["a", "b"]


def test_without_ranks_a_layer_that_communicates_is_named() -> None:
    with pytest.raises(ValueError, match="linear0: this layer exchanges arrays"):
        run_together([loop(0, [])], None)
