"""Checks that all ranks have the same data and the same loaded weights, by checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.agree import name_ranks
from pydtnn.data import Dataset
from pydtnn.data.batch import parts
from pydtnn.data.loader import read_samples
from pydtnn.utils.errors import AgreedError

ROWS = 16
"""Samples of a data set that are compared."""


def check_data(comm: Communicator, datasets: Sequence[tuple[str, Dataset | None]]) -> None:
    """Raise AgreedError if data sets differ between ranks. Collective: all ranks call it.

    A few evenly spaced samples are read, and their checksums, types and shapes are compared. If a
    data set returns different values when read twice, because it applies augmentation, only types
    and shapes are compared.

    Parameters
    ----------
    comm : Communicator
    datasets : sequence of (str, Dataset or None)
        Description, such as "training set", and data set, of equal length on all ranks.

    Raises
    ------
    AgreedError
        On all ranks, naming those that differ from rank 0.
    """
    if comm.size == 1:
        return
    present = [(what, data) for what, data in datasets if data is not None]
    everywhere = comm.gather_object([_of_data(data) for _, data in present])
    for number, (what, data) in enumerate(present):
        prints = [own[number] for own in everywhere]
        same = all(first == second for _, first, second in prints)  # each rank read twice
        own = [(kind, first if same else None) for kind, first, _ in prints]
        _raise_if_different(
            own,
            f"the samples of the {what} {data.name}",
            "give every rank the same data, in the same order",
        )


def check_loaded(comm: Communicator, loaded: str | None, *, before_broadcast: bool) -> None:
    """Raise AgreedError if ranks have loaded different weights. Collective: all ranks call it.

    Parameters
    ----------
    comm : Communicator
    loaded : str or None
        `Model.loaded`.
    before_broadcast : bool
        Whether rank 0's weights will be sent to all ranks, so that the others may have loaded none.

    Raises
    ------
    AgreedError
        On all ranks, naming those that differ from rank 0.
    """
    if comm.size == 1:
        return
    own = comm.gather_object(loaded)
    if before_broadcast:
        own = [own[0] if other is None else other for other in own]
    _raise_if_different(own, "the weights that were loaded", "load the same file on every rank")


def _raise_if_different(prints: Sequence[Any], what: str, advice: str) -> None:
    others = [rank for rank, value in enumerate(prints) if value != prints[0]]
    if others:
        raise AgreedError(
            f"Trainer: {what} differ on {name_ranks(others)} from those on rank 0; {advice}"
        )


def _of_data(data: Dataset) -> tuple[str, str, str]:
    """Return types and shapes of samples, and the checksums of reading some of them twice."""
    rows = np.unique(np.linspace(0, len(data) - 1, ROWS).astype(np.int64))
    read = [[*map(parts, read_samples(data, rows))] for _ in range(2)]
    kinds = [f"{a.dtype} {a.shape}" for arrays in read[0] for a in arrays]
    first, second = (_checksum([a for arrays in both for a in arrays]) for both in read)
    return ", ".join(kinds), first, second


def _checksum(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
