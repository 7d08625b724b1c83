"""The first reading of samples: checksums, checks and statistics; equal weights on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from operator import add
from typing import TypeVar

import numpy as np

from pydtnn.comm import Communicator, agree
from pydtnn.data import Dataset, Subset
from pydtnn.data.order import rank_slice
from pydtnn.data.statistics import PixelSums, chunk_rows, pixel_sums
from pydtnn.utils.collective import raise_if_different
from pydtnn.utils.errors import EXPLAINED
from pydtnn.utils.observer import Observer, phase


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
    what = "the weights that were loaded"
    raise_if_different(comm, "Trainer", what, own, "load the same file on every rank")


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
        from pydtnn.data.images import name_bad

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
