"""What is not finite shows in the sum of the step; what is finite stays so, and what is small too.

Drawn at random: infinities, NaN, subnormal numbers and the largest ones, among ordinary gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.compression import Compressor, create_sums
from pydtnn.parallel.sums import Sums
from tests.each import each
from tests.parallel.compression.cases import buckets_of, exchanged, fill, gradients

ALL: list[tuple[str, dict[str, Any]]] = [
    *((name, {"feedback": True}) for name in ("float16", "bfloat16")),
    ("float16", {"scale": 1024.0}),
    *((name, {"block": 64, "feedback": f}) for name in ("int8", "sign") for f in (False, True)),
    *((name, {"feedback": f}) for name in ("top_k", "random_k") for f in (False, True)),
    ("sign", {"block": 64, "served": True}),
    *(("sign_vote", {}), ("dgc", {"share": 0.05})),
    *(("power_sgd", {"rank": rank}) for rank in (1, 2)),
]

SHAPES = [(7,), (6, 3, 3, 2), (16,), (1,), (9, 13)]


every_case = each("case", ALL)


def prepared(
    comm: Communicator, case: tuple[str, dict[str, Any]], dtype: str
) -> tuple[Sums, Bucket]:
    (bucket,) = buckets_of(SHAPES, dtype)
    sums = create_sums(case[0], **case[1])(comm)
    sums.prepare((bucket,))
    return sums, bucket


@pytest.mark.threads(1, 3)
@each("dtype", ["float32", "float64"])
@every_case
def test_what_is_not_finite_shows_in_the_sum_of_the_step_on_all_ranks(comm, case, dtype):
    sums, bucket = prepared(comm, case, dtype)
    rng = np.random.default_rng(5)  # the same on all ranks
    for step in range(0, 10, 2):
        arrays = gradients(bucket, comm.rank, step)
        one, rank = rng.integers(len(arrays)), rng.integers(comm.size)
        place, bad = rng.integers(arrays[one].size), rng.choice([np.nan, np.inf, -np.inf])
        if comm.rank == rank:
            arrays[one].reshape(-1)[place] = bad
        fill(bucket, arrays)
        sums.start(bucket).wait()
        assert not np.isfinite(bucket.grads).all()
        exchanged(comm, sums, (bucket,), step + 1)
        assert np.isfinite(bucket.grads).all()  # nothing of it is left


@pytest.mark.threads(1, 3)
@each("dtype", ["float32", "float64"])
@every_case
def test_what_is_finite_stays_so_however_large_or_small(comm, case, dtype):
    sums, bucket = prepared(comm, case, dtype)
    rng, info = np.random.default_rng(comm.rank), np.finfo(dtype)
    lowest = np.log10(float(info.smallest_subnormal))
    highest = np.log10(float(info.max) / comm.size / 2)  # so that not even the sum is infinite
    for _ in range(8):
        sums.prepare((bucket,))  # errors that add up over steps may become infinite, rightly
        powers = rng.choice([*rng.uniform(lowest, highest, 2), highest], 2)
        for entry in bucket.parameters:
            sizes = rng.uniform(min(powers), max(powers), entry.shape)
            values = 10.0**sizes * rng.choice([-1, 0, 1], entry.shape)
            bucket.grads[entry.slice] = values.reshape(-1)
        sums.start(bucket).wait()
        assert np.isfinite(bucket.grads).all()


@each("factor", [1e-45, 1e-43, 1e-40, 1e-37, 1e37])
@each("name", ["int8", "sign", "top_k", "power_sgd"])
def test_gradients_of_any_size_arrive(name, factor):
    """All of one size, within what a compressor loses of ordinary gradients."""
    case = next(case for case in ALL if case[0] == name)
    sums, bucket = prepared(Serial(), case, "float32")
    fill(bucket, [np.full(entry.shape, factor) for entry in bucket.parameters])
    sent = bucket.grads.copy()
    sums.start(bucket).wait()
    kept = bucket.grads != 0
    assert kept.any()
    # Subnormal numbers are multiples of 1.4e-45, which the compressor rounds to.
    np.testing.assert_allclose(bucket.grads[kept], sent[kept], rtol=1e-6, atol=3e-45)


@pytest.mark.threads(1, 2)
@each("feedback", [False, True])
@each("kind", ["float32", "uint8"])
def test_a_compressor_that_leaves_nan_out_cannot_hide_it(comm, kind, feedback):
    def compress(x: np.ndarray, context: Any) -> tuple[np.ndarray, ...]:
        kept = np.flatnonzero(np.abs(x) > 0.5)  # which NaN is not
        return kept.astype("uint16"), x[kept].astype(kind)

    def restore(parts: Any, out: np.ndarray, context: Any) -> None:
        out[parts[0]] += parts[1]

    (bucket,) = buckets_of(SHAPES)
    sums = Compressor(compress, restore, varies=True, feedback=feedback)(comm)
    sums.prepare((bucket,))
    fill(bucket, [np.ones(entry.shape) for entry in bucket.parameters])
    bucket.grads[3] = np.nan
    if kind == "float32":
        sums.start(bucket).wait()
        assert np.isnan(bucket.grads).any()
    else:
        with pytest.raises(
            ValueError, match=r"Compressor: .* gradients of rank \d are infinite or"
        ):
            sums.start(bucket)
