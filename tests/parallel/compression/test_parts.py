"""What `compress` may return, and what `restore` may do with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Serial
from pydtnn.parallel.compression import Compressor
from tests.each import each
from tests.parallel.compression.cases import buckets_of, exchanged, fill, gradients, read

OPTIONS = [
    {"feedback": feedback, "varies": varies, "adds": adds}
    for feedback in (False, True)
    for varies, adds in ((False, False), (True, False), (False, True))
]


def first(count: int | None, **options: Any) -> Compressor:
    """Send a view of the first gradients, of all with None."""

    def restore(parts: Any, out: np.ndarray, context: Any) -> None:
        out[:count] += parts[0]

    return Compressor(lambda x, context: (x[:count],), restore, **options)


@pytest.mark.threads(1, 2, 3)
@each("count", [2, None])
@each("options", OPTIONS)
def test_parts_may_be_views_of_the_gradients(comm, count, options):
    buckets = buckets_of(dtype="float64", bucket_bytes=1 << 9)
    sums = first(count, **options)(comm)
    sums.prepare(buckets)
    for step in range(3):
        results = exchanged(comm, sums, buckets, step)
        for bucket, result in zip(buckets, results, strict=True):
            everything = [gradients(bucket, r, step) for r in range(comm.size)]
            total = np.concatenate(
                [sum(arrays).reshape(-1) for arrays in zip(*everything, strict=True)]
            )
            given = np.concatenate([array.reshape(-1) for array in result])
            # Only the order of the ranks differs. The first are sent whole each time.
            np.testing.assert_allclose(given[:count], total[:count], rtol=0, atol=1e-14)
            assert count is None or not given[count:].any()


@pytest.mark.threads(2)
@each("feedback", [False, True])
def test_views_are_sent_as_they_were_where_the_next_step_begins_before(comm, feedback):
    own = buckets_of(dtype="float64")
    sums = first(None, varies=True, feedback=feedback)(comm)
    sums.prepare(own)
    late = [replace(own[0], grads=np.zeros_like(own[0].grads)) for _ in range(3)]
    requests = []
    for step, bucket in enumerate(late):
        fill(bucket, gradients(bucket, comm.rank, step))
        requests.append(sums.start(bucket))
    for request in requests:
        request.wait()
    for step, bucket in enumerate(late):
        everything = [gradients(bucket, r, step) for r in range(comm.size)]
        for given, *arrays in zip(read(bucket), *everything, strict=True):
            np.testing.assert_allclose(given, sum(arrays), rtol=0, atol=1e-14)  # rounding


def test_lengths_that_vary_cannot_be_added():
    with pytest.raises(ValueError, match=r"Compressor: adds and varies cannot both be true"):
        first(None, adds=True, varies=True)


def test_a_restore_that_returns_a_sum_instead_of_adding_to_out_is_told_so():
    buckets = buckets_of()
    sums = Compressor(lambda x, _: (x,), lambda parts, out, _: out + parts[0])(Serial())
    sums.prepare(buckets)
    fill(buckets[0], gradients(buckets[0], 0, 0))
    with pytest.raises(TypeError, match=r"Compressor: restore must add to its argument out"):
        sums.start(buckets[0]).wait()
