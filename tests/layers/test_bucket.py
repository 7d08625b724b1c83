"""What may be assigned to a bucket: changes in place, and arrays to copy."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.testing import check_scheme
from tests.each import each
from tests.parallel.compression.cases import buckets_of


def bucket() -> Bucket:
    (one,) = buckets_of([(3,), (2, 2)], "float64")
    one.values[...] = np.arange(16)
    return one


def test_changes_in_place_are_made_in_the_flat_arrays() -> None:
    one = bucket()
    values, grads = one.values, one.grads
    one.grads += np.arange(16.0)
    one.grads *= 3
    one.values /= 2
    one.values -= 1
    assert one.values is values
    assert one.grads is grads
    np.testing.assert_array_equal(one.buffer.grads, 3 * np.arange(16.0))
    np.testing.assert_array_equal(one.buffer.values, np.arange(16.0) / 2 - 1)


def test_another_array_is_copied_into_the_flat_array() -> None:
    one = bucket()
    values = one.values
    one.values = one.values / 4
    one.grads = one.grads + 1
    assert one.values is values
    np.testing.assert_array_equal(one.buffer.values, np.arange(16.0) / 4)
    np.testing.assert_array_equal(one.buffer.grads, np.ones(16))


@each("value", [0, np.zeros(3), np.zeros((2, 8)), [0.0] * 16, None])
def test_what_is_no_array_of_the_bucket_s_length_is_refused(value: object) -> None:
    one = bucket()
    message = r"Bucket: grads must have shape \(16,\), got .*; fill it with"
    with pytest.raises(ValueError, match=message):
        one.grads = value  # type: ignore[assignment]


@each("name", ["index", "buffer", "grad"])
def test_nothing_else_can_be_assigned(name: str) -> None:
    message = f"Bucket: {name} cannot be assigned; change the elements of values and grads"
    with pytest.raises(AttributeError, match=re.escape(message)):
        setattr(bucket(), name, 3)


def test_a_scheme_of_one_s_own_may_add_and_divide_in_place() -> None:
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
