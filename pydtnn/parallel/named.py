"""Arrays as long as the buckets, and the same arrays by the names of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from pydtnn.comm.checks import fill, to_host
from pydtnn.layers.parameters import Bucket


def by_name(
    what: str, buckets: Iterable[Bucket], arrays: Iterable[np.ndarray]
) -> dict[str, np.ndarray]:
    """Copy arrays as long as the buckets to NumPy arrays by parameter: "<what>/<name>"."""
    return {
        f"{what}/{entry.name}": to_host(array[entry.slice]).reshape(entry.shape)
        for bucket, array in zip(buckets, arrays, strict=True)
        for entry in bucket.parameters
    }


def from_names(
    what: str,
    buckets: Iterable[Bucket],
    arrays: Iterable[np.ndarray],
    state: Mapping[str, np.ndarray],
) -> None:
    """Fill arrays as long as the buckets from the result of `by_name`."""
    for bucket, array in zip(buckets, arrays, strict=True):
        for entry in bucket.parameters:
            fill(array[entry.slice], state[f"{what}/{entry.name}"].reshape(-1))
