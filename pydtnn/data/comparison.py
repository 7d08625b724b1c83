"""Comparison of the samples that ranks are given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.batch import parts
from pydtnn.data.dataset import Dataset, read_samples
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


def check_data(ranks: Ranks, who: str, datasets: Sequence[tuple[str, Dataset | None]]) -> None:
    """Raise AgreedError if data sets differ between ranks. Collective: all ranks call it.

    A few evenly spaced samples are read, and their checksums, types and shapes are compared, with
    the number of all. If a data set returns different values when read twice, because it applies
    augmentation, only number, types and shapes are compared.

    Parameters
    ----------
    ranks : Communicator
    who : str
        First word of the error.
    datasets : sequence of (str, Dataset or None)
        Description, such as "training set", and data set.

    Raises
    ------
    AgreedError
        On all ranks, naming those that differ from rank 0.
    """
    if ranks.size == 1:
        return
    present = [(what, data) for what, data in datasets if data is not None]
    everywhere = ranks.gather_object([_of_data(data) for _, data in present])
    for number, (what, data) in enumerate(present):
        prints = [own[number] for own in everywhere]
        same = all(first == second for _, first, second in prints)  # each rank read twice
        own = [(kind, first if same else None) for kind, first, _ in prints]
        raise_if_different(ranks, who, f"the samples of the {what} {data.name}", own, ADVICE)


def _of_data(data: Dataset) -> tuple[str, str, str]:
    """Return number, types and shapes of samples, and the checksums of reading some twice."""
    rows = evenly_spaced(len(data))
    read = [[*map(parts, read_samples(data, rows))] if len(rows) else [] for _ in range(2)]
    kinds = [f"{a.dtype} {a.shape}" for arrays in read[0] for a in arrays]
    first, second = (checksum([a for arrays in both for a in arrays]) for both in read)
    return f"{len(data)}: {', '.join(kinds)}", first, second


def evenly_spaced(count: int) -> NDArray[np.int64]:
    """Return the indices of the compared ones of `count` samples.

    >>> evenly_spaced(3).tolist(), evenly_spaced(100)[-2:].tolist()
    ([0, 1, 2], [92, 99])
    """
    return np.unique(np.linspace(0, max(count - 1, 0), COMPARED_SAMPLES).astype(np.int64))[:count]


def checksum(arrays: Sequence[np.ndarray]) -> str:
    """Return a checksum of the elements of arrays."""
    return hashlib.blake2b(b"".join(x.tobytes() for x in arrays), digest_size=8).hexdigest()
