"""Comparison of the samples that ranks are given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.utils.collective import Ranks, raise_if_different

COMPARED_SAMPLES = 16
"""Samples that are compared."""

ADVICE = "give every rank the same data, in the same order"


def check_samples(ranks: Ranks, who: str, inputs: Sequence[Any]) -> None:
    """Raise AgreedError if arrays of samples differ between ranks. Collective.

    Parameters
    ----------
    ranks : Communicator
    who : str
        First word of the error.
    inputs : sequence of ndarray
        Samples for each input; a few evenly spaced ones are compared.
    """
    kinds = [(str(x.dtype), tuple(x.shape)) for x in inputs]
    some = checksum([np.asarray(x[evenly_spaced(len(x))]) for x in inputs])
    raise_if_different(ranks, who, "the samples", ranks.gather_object((kinds, some)), ADVICE)


def evenly_spaced(count: int) -> NDArray[np.int64]:
    """Return the indices of the compared ones of `count` samples."""
    return np.unique(np.linspace(0, max(count - 1, 0), COMPARED_SAMPLES).astype(np.int64))[:count]


def checksum(arrays: Sequence[np.ndarray]) -> str:
    """Return a checksum of the elements of arrays."""
    return hashlib.blake2b(b"".join(x.tobytes() for x in arrays), digest_size=8).hexdigest()
