"""The first reading of samples: checksums, checks, statistics, and equal data on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from operator import add
from typing import Any, TypeVar

import numpy as np

from pydtnn.comm import Communicator, agree
from pydtnn.comm.agree import name_ranks
from pydtnn.data import Dataset, Subset
from pydtnn.data.batch import parts
from pydtnn.data.images import name_bad
from pydtnn.data.loader import read_samples
from pydtnn.data.order import rank_slice
from pydtnn.data.statistics import PixelSums, chunk_rows, pixel_sums
from pydtnn.utils.errors import EXPLAINED, AgreedError
from pydtnn.utils.observer import Observer, phase

COMPARED_SAMPLES = 16
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
    rows = np.unique(np.linspace(0, len(data) - 1, COMPARED_SAMPLES).astype(np.int64))
    read = [[*map(parts, read_samples(data, rows))] for _ in range(2)]
    kinds = [f"{a.dtype} {a.shape}" for arrays in read[0] for a in arrays]
    first, second = (_checksum([a for arrays in both for a in arrays]) for both in read)
    return ", ".join(kinds), first, second


def _checksum(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# Common choice of algorithms by all ranks, before the first step.
#
# One rank of each kind of machine (CPU, build, instruction set, threads), or one group of ranks
# that have the network together, runs a step on generated data, in which its backend measures every
# key that is not in its cache file. The table is then sent to all ranks of that kind, and nothing
# is measured afterwards: all ranks use the same algorithms, also for the last smaller batch and
# evaluations, and checkpoints contain the choices.


T = TypeVar("T")


def examine(comm: Communicator, *datasets: Dataset | None, threads: int = 1) -> None:
    """Read all files once, each rank its share, unless they are known.

    Files are compared with their checksums (`Dataset.verify`), and all samples are read
    (`Dataset.examined`). The deadline of a wait applies to each part of both: a file system that
    does not respond ends the run.

    Collective: all ranks call it. Statistics of a training set are those of all its samples, with
    the same bytes for any number of ranks: sums of integers. There are no messages for data sets
    that need no examination (`Dataset.examined`).

    Parameters
    ----------
    comm : Communicator
    *datasets : Dataset or None
    threads : int
        Threads of this rank that read; 0 is 1.

    Raises
    ------
    AgreedError
        On all ranks, if a rank cannot read a sample.
    """
    for dataset in _originals(datasets):
        states = comm.gather_object((dataset.verified, dataset.examined))
        verified, examined = (all(column) for column in zip(*states, strict=True))
        if verified and examined:
            continue
        sums, problem = pixel_sums(dataset.read, dataset.input_shape, range(0)), None
        activity = comm.supervision.activity if comm.supervision is not None else None
        share = rank_slice(len(dataset), comm.rank, comm.size)
        with phase(activity, "examination"):  # others may wait for its end as long as it proceeds
            try:
                if not verified:
                    for _ in _timed(activity, dataset.verify(comm.rank, comm.size)):
                        pass
                if not examined:
                    sums = reduce(add, _timed(activity, _read(dataset, share, threads)), sums)
            except EXPLAINED as error:
                problem = error
            agree(comm, problem)
        dataset.verified = True
        total = reduce(add, comm.gather_object(sums))
        if not examined and dataset.like is None and "statistics" not in vars(dataset):
            dataset.statistics = total.statistics()
        dataset.examined = True


def _originals(datasets: tuple[Dataset | None, ...]) -> list[Dataset]:
    """Return the data sets to examine, those of subsets instead of them, each once."""
    found: dict[int, Dataset] = {}
    for dataset in datasets:
        while isinstance(dataset, Subset):
            dataset = dataset.like
        if dataset is not None and dataset.examined is not None:
            found[id(dataset)] = dataset
    return list(found.values())


def _timed(activity: Observer | None, parts: Iterator[T]) -> Iterator[T]:
    """Yield the parts of a long work; the deadline of a wait applies to each."""
    while True:
        with phase(activity, "examination"):
            try:
                part = next(parts)
            except StopIteration:
                return
        yield part


def _read(dataset: Dataset, share: slice, threads: int) -> Iterator[PixelSums]:
    """Read the samples of this rank, and yield sums of their pixels."""
    rows = chunk_rows(dataset.input_shape)
    chunks = [
        range(start, min(start + rows, share.stop))
        for start in range(share.start, share.stop, rows)
    ]
    problems: list[str] = []
    with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="pydtnn-loader") as pool:
        for sums, bad in pool.map(partial(_sum_or_name_bad, dataset), chunks):
            problems += bad
            yield sums
    if problems:
        raise ValueError(f"{dataset.name}: {name_bad(problems)}")


def _sum_or_name_bad(dataset: Dataset, chunk: range) -> tuple[PixelSums, list[str]]:
    """Sum the pixels of samples; if this fails, return what is wrong with each of them."""
    try:
        return pixel_sums(dataset.read, dataset.input_shape, chunk), []
    except EXPLAINED:
        problems = []
        for sample in chunk:
            try:
                dataset.read(np.array([sample]))
            except EXPLAINED as error:
                problems.append(str(error).removeprefix(f"{dataset.name}: "))
        if not problems:
            raise
        return pixel_sums(dataset.read, dataset.input_shape, range(0)), problems
