"""The first reading of samples that are decoded from files: checks and statistics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add

from pydtnn.comm import Communicator, agree
from pydtnn.data import Dataset, Subset
from pydtnn.data.order import rank_slice
from pydtnn.data.statistics import PixelSums, chunk_rows, pixel_sums
from pydtnn.utils.errors import EXPLAINED
from pydtnn.utils.observer import phase


def examine(comm: Communicator, *datasets: Dataset | None, threads: int = 1) -> None:
    """Read all samples once, each rank its share, unless they are known.

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
        if all(comm.gather_object(dataset.examined)):
            continue
        sums, problem = None, None
        activity = comm.supervision.activity if comm.supervision is not None else None
        try:
            with phase(activity, "examination"):  # has no deadline
                sums = _read(dataset, rank_slice(len(dataset), comm.rank, comm.size), threads)
        except EXPLAINED as error:
            problem = error
        agree(comm, problem)
        total = reduce(add, comm.gather_object(sums))
        if dataset.like is None and "statistics" not in vars(dataset):  # neither given nor measured
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


def _read(dataset: Dataset, share: slice, threads: int) -> PixelSums:
    """Read the samples of this rank, and sum their pixels."""
    rows = chunk_rows(dataset.input_shape)
    chunks = [
        range(start, min(start + rows, share.stop))
        for start in range(share.start, share.stop, rows)
    ]
    nothing = pixel_sums(dataset.read, dataset.input_shape, range(0))
    with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="pydtnn-loader") as pool:
        parts = pool.map(lambda chunk: pixel_sums(dataset.read, dataset.input_shape, chunk), chunks)
        return reduce(add, parts, nothing)
