"""Buckets as models have them, and gradients to put into them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.kernels import create_backend
from pydtnn.layers.initializers import Constant
from pydtnn.layers.parameters import Bucket, Parameter, ParameterBuffer
from pydtnn.parallel.sums import Sums

SHAPES = [(7,), (5, 3, 3, 2), (16,), (1,), (9, 13), (31,)]
"""Vectors and matrices, most of which leave padding behind them."""


def buckets_of(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: str = "float32", bucket_bytes: int = 1 << 20
) -> tuple[Bucket, ...]:
    parameters = [(Parameter(f"p{i}", shape, Constant(0.0)), i) for i, shape in enumerate(shapes)]
    backend = create_backend("numpy")
    buffer = ParameterBuffer(parameters, backend=backend, dtype=dtype, bucket_bytes=(bucket_bytes,))
    return buffer.buckets


def gradients(bucket: Bucket, rank: int, step: int) -> list[np.ndarray]:
    """What rank `rank` has computed in a step: one array per parameter, of very different sizes."""
    rng = np.random.default_rng([bucket.index, rank, step])
    dtype = bucket.grads.dtype
    return [
        (rng.normal(size=e.shape) * 10.0 ** rng.integers(-4, 1)).astype(dtype)
        for e in bucket.parameters
    ]


def fill(bucket: Bucket, arrays: Sequence[np.ndarray]) -> None:
    bucket.grads[...] = 0
    for entry, array in zip(bucket.parameters, arrays, strict=True):
        bucket.grads[entry.slice] = array.reshape(-1)


def read(bucket: Bucket) -> list[np.ndarray]:
    return [bucket.grads[e.slice].reshape(e.shape).copy() for e in bucket.parameters]


def exchanged(
    comm: Communicator, sums: Sums, buckets: Sequence[Bucket], step: int
) -> list[list[np.ndarray]]:
    """Make a step of sums with all buckets under way at the same time."""
    for bucket in buckets:
        fill(bucket, gradients(bucket, comm.rank, step))
    requests = [sums.start(bucket) for bucket in buckets]
    requests[0].test()
    for request in requests:
        request.wait()
    return [read(bucket) for bucket in buckets]


def padding(bucket: Bucket) -> np.ndarray:
    """The gradients between the parameters."""
    between = np.ones(len(bucket.grads), bool)
    for entry in bucket.parameters:
        between[entry.slice] = False
    return bucket.grads[between]
