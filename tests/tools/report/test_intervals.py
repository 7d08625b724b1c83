"""Intervals of an epoch, and fewer of them."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.tools.runs.run import Intervals, read_intervals
from tests.each import each


def intervals(count: int) -> Intervals:
    columns = {name: [*range(1, count + 1)] for name in ("step", "seconds", "loss", "lr")}
    return read_intervals(2, {**columns, "samples": [8] * count})


def test_merged_intervals_have_the_same_sums_and_the_last_steps():
    merged = intervals(50).merged(7)
    assert len(merged.step) == 7
    assert merged.step[-1] == 50
    assert merged.seconds.sum() == sum(range(1, 51))
    assert merged.samples.sum() == 400
    lengths = np.diff(merged.step, prepend=0)
    assert (merged.loss * lengths).sum() == sum(range(1, 51))
    assert intervals(3).merged(7).step.tolist() == [1, 2, 3]


def test_positions_are_fractions_of_epochs():
    assert intervals(4).position().tolist() == [1.25, 1.5, 1.75, 2]


def test_the_steps_of_an_epoch_that_was_resumed_are_those_after_it():
    columns = {name: [1.0] * 3 for name in ("seconds", "samples", "loss", "lr")}
    assert read_intervals(1, {**columns, "step": [2, 4, 6]}).steps == 6
    assert read_intervals(1, {**columns, "step": [14, 16, 17]}).steps == 5
    assert intervals(50).merged(7).steps == 50


@each("change", [{"step": [2, 1]}, {"seconds": [0, 1]}, {"loss": [1]}, {"lr": None}, {"step": []}])
def test_columns_that_cannot_be_drawn_are_refused(change):
    columns = {name: [1, 2] for name in ("step", "seconds", "samples", "loss", "lr")}
    with pytest.raises((ValueError, TypeError)):
        read_intervals(1, columns | change)
