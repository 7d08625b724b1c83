"""Walks that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.model.execution import Loop, run_together


def walk(start: float, told: list[float]) -> Loop:
    """Contribute twice, and return what it made of the totals."""
    first = yield np.array([start])
    told.append(first[0])
    second = yield first + start
    told.append(second[0])
    return start


def test_each_walk_is_sent_the_total_of_all() -> None:
    told: list[list[float]] = [[], [], []]
    walks = [walk(start, told[start]) for start in range(3)]
    seen: list[list[float]] = []

    def total(sums: Sequence[np.ndarray]) -> np.ndarray:
        seen.append([float(s[0]) for s in sums])
        return sum(sums, np.zeros(1))

    assert run_together(walks, total) == [0, 1, 2]
    assert seen == [[0, 1, 2], [3, 4, 5]]
    assert told == [[3, 12]] * 3


def test_whoever_goes_on_is_announced() -> None:
    order: list[int] = []
    walks = [walk(start, []) for start in range(2)]
    run_together(walks, lambda sums: sums[0] + sums[1], order.append)
    assert order == [0, 1, 0, 1, 0, 1]


def test_walks_that_never_stop_run_one_after_the_other() -> None:
    order: list[str] = []

    def silent(name: str) -> Loop:
        order.append(name)
        return name
        yield  # makes it a generator

    assert run_together([silent("a"), silent("b")], None) == ["a", "b"]
    assert order == ["a", "b"]
