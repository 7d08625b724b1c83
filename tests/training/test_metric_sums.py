"""Totals: sums and counts that add up over batches and ranks."""

import math

import numpy as np
import pytest

from pydtnn.training.metric_sums import Totals


def test_parts_of_a_batch_add_up_like_an_allreduce_of_the_values():
    parts = [Totals(["loss"]) for _ in range(3)]
    for count, part in enumerate(parts):  # the first rank has no sample
        part.add(count, 2.0 * count)
    summed = Totals(["loss"])
    summed.values[:] = sum(part.values for part in parts)
    assert math.isnan(parts[0].means()["loss"])
    parts[0] += parts[1]
    parts[0] += parts[2]
    np.testing.assert_array_equal(parts[0].values, summed.values)
    assert summed.means() == {"loss": 2.0}
    assert summed.values.dtype == np.float64


def test_a_sum_of_totals_has_their_sizes_and_last_operations():
    options = {
        "results": {"spread": lambda sums, count: (sums[1] - sums[0]) / count},
        "sizes": {"spread": 2},
    }
    first, second = (Totals(["spread", "loss"], **options) for _ in range(2))
    first.add(1, [1.0, 2.0], 3.0)
    second.add(3, [3.0, 6.0], 1.0)
    assert (first + second).means() == {"spread": 1.0, "loss": 1.0}
    assert first.means() == {"spread": 1.0, "loss": 3.0}


def test_sums_of_other_quantities_are_refused():
    totals = Totals(["loss"])
    with pytest.raises(ValueError, match="expected sums of"):
        totals.add(1, 2.0, 3.0)
    with pytest.raises(ValueError, match=r"expected sums of \('loss',\), got \('accuracy',\)"):
        totals += Totals(["accuracy"])


def test_sums_of_another_shape_are_not_taken():
    totals = Totals(["loss"])
    totals.add(3, 6.0)
    with pytest.raises(ValueError, match=r"sums must have shape \(2,\), got .*; use those"):
        totals.load(np.zeros(3))
    assert totals.means() == {"loss": 2.0}
