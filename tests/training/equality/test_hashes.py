"""Which hashes are kept between comparisons, and how many arrays are hashed per step."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pydtnn.training.equality.check import MAX_HASHES, MAX_TIME_SHARE, Hashes, Pace, hash_all
from tests.each import each


def arrays(number: int = 5) -> list[np.ndarray]:
    return [np.full(3, float(i)) for i in range(number)]


def test_every_array_is_hashed_after_each_step() -> None:
    own = arrays()
    hashes = Hashes(own, every=10)
    first = hashes.complete(0)
    for step in (1, 2, 3):
        own[2] += step == 2
        hashes.after(step)
    np.testing.assert_array_equal(first, hash_all(arrays()))
    assert [*hashes.of(2)] == [0, 1, 2, 3]
    before, *after = hashes.of(2).values()
    assert after[0] == before != after[1] == after[2]
    assert len({*hashes.of(4).values()}) == 1
    hashes.complete(4)
    hashes.forget()  # what was equal, but for the last
    hashes.after(5)
    assert [*hashes.of(0)] == [4, 5]


@each("spread", [2, 7])
def test_arrays_take_turns(spread: int) -> None:
    hashes = Hashes(arrays(), every=100)
    hashes.set_spread(spread)
    hashes.complete(20)
    for step in range(21, 21 + 2 * spread):
        hashes.after(step)
    for index in range(5):
        first, second = (step for step in hashes.of(index) if step > 20)
        assert second - first == spread
        assert first % spread == index % spread


def test_long_intervals_keep_a_limited_number_of_hashes() -> None:
    hashes = Hashes(arrays(2), every=10 * MAX_HASHES)
    hashes.complete(0)
    for step in range(1, 10 * MAX_HASHES):
        hashes.after(step)
    assert MAX_HASHES - 1 <= len(hashes.of(0)) <= MAX_HASHES + 1


def test_between_two_steps_nothing_is_hashed_if_it_would_take_too_long() -> None:
    hashes = Hashes(arrays(), every=10)
    hashes.set_spread(10)
    hashes.complete(0)
    hashes.after(1)
    assert hashes.spread == 0
    assert [*hashes.of(0)] == [0]


def test_the_number_of_steps_follows_from_the_times_of_hashes_and_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    class Slow(Hashes):
        def after(self, step: int) -> None:
            nonlocal now
            now += 0.0075

    hashes, pace, steps = Slow(arrays(), every=100), Pace(), 0
    while not pace.measure(hashes, steps):
        steps += 1
        now += 0.5
        if steps == 2:  # a long evaluation does not count
            now += 100
            pace.pause()
    assert pace.spread() == np.ceil(0.0075 / (MAX_TIME_SHARE * 0.5)) == 4
