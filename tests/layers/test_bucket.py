"""What may be assigned to a bucket: changes in place, and arrays to copy."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.tools.testing import check_scheme
from tests.each import each
from tests.parallel.compression.cases import buckets_of


def bucket() -> Bucket:
    (one,) = buckets_of([(3,), (2, 2)], "float64")
    one.values[...] = np.arange(16)
    return one


def test_changes_and_copies_are_made_in_the_flat_arrays():
    one = bucket()
    values, grads = one.values, one.grads
    one.grads += np.arange(16.0)
    one.grads *= 3
    one.values /= 2
    one.values -= 1
    one.values = one.values * 4
    assert one.values is values
    assert one.grads is grads
    np.testing.assert_array_equal(one.buffer.grads, 3 * np.arange(16.0))
    np.testing.assert_array_equal(one.buffer.values, 2 * np.arange(16.0) - 4)


@each("value", [0, np.zeros(3), np.zeros((2, 8)), [0.0] * 16, None])
def test_only_arrays_of_the_length_can_be_assigned_to_values_and_grads(value):
    with pytest.raises(ValueError, match=r"Bucket: grads must have shape \(16,\), got .*; fill it"):
        bucket().grads = value  # type: ignore[assignment]
    for name in ("index", "buffer", "grad"):
        with pytest.raises(AttributeError, match=f"Bucket: {name} cannot be assigned; change"):
            setattr(bucket(), name, value)


def test_a_scheme_of_one_s_own_may_add_and_divide_in_place():
    class Mean(GradientExchange):
        equal = True

        def update(self, optimizer):
            for bucket in self.buckets:
                bucket.grads *= self.comm.size
                bucket.grads /= self.comm.size
                self.comm.allreduce(bucket.grads)
            optimizer.step()

    report = check_scheme(Mean, ranks=[2])
    assert report.rows[0].ranks == 2
