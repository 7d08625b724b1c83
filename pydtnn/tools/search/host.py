"""What the groups of a host share: its memory, and one copy of the data sets."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.workload import describe_data, describe_run
from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0, together
from pydtnn.data import Dataset
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.predicted import predict
from pydtnn.tools.search.dimension import WHO
from pydtnn.utils.machine import free_memory
from pydtnn.utils.units import memory

T = TypeVar("T")

PLACES = ("/dev/shm", None)
"""Folders of the file that processes share: in memory, where there is room, or the usual one."""

PREFIX = "pydtnn-data-"
"""Of the file's name."""

ALIGNMENT = 64

PLATFORM = "laptop"
"""A platform for predictions of memory, which is the same on all."""


def share_on_host(comm: Communicator, load: Callable[[], T]) -> T:
    """Return an object whose arrays are in memory once for all ranks of a host.

    Collective: all ranks call it; the first of each host loads. Arrays cannot be written. The
    object is loaded by each rank if it cannot be sent, or if there is no room for the arrays.

    Parameters
    ----------
    comm : Communicator
    load : callable
        Loads the object.
    """
    if comm.size == 1:
        return together(comm, load)
    with comm.split_by_host() as host:
        loaded = on_rank_0(host, load)
        if host.size == 1 and loaded is not None:
            return loaded
        name, text, lengths = host.gather_object(on_rank_0(host, _write, loaded))[0]
        if not name:
            return load() if loaded is None else loaded
        with open(name, "rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        host.barrier()
        on_rank_0(host, os.unlink, name)  # the memory exists as long as one maps it
    begins = [sum(map(_aligned, lengths[:place])) for place in range(len(lengths))]
    parts = [memory[b : b + n] for b, n in zip(begins, lengths, strict=True)]
    found: T = pickle.loads(text, buffers=parts)  # of the first rank
    return found


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _write(loaded: Any) -> tuple[str, bytes, list[int]]:
    """Write the arrays of an object into a file; return it, the rest, and lengths of arrays in B.

    The name is empty if that is not possible.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        text = pickle.dumps(loaded, protocol=5, buffer_callback=buffers.append)
    except Exception:  # of any kind: objects define how they are pickled
        return "", b"", []
    arrays = [buffer.raw() for buffer in buffers]
    lengths = [array.nbytes for array in arrays]
    for place in PLACES if lengths else ():
        with contextlib.suppress(OSError):
            file, name = tempfile.mkstemp(prefix=PREFIX, dir=place)
            try:
                with open(file, "wb") as output:
                    os.posix_fallocate(file, 0, max(1, sum(map(_aligned, lengths))))
                    for array in arrays:
                        output.write(array)
                        output.write(bytes(_aligned(array.nbytes) - array.nbytes))
            except OSError:
                Path(name).unlink()
                raise
            return name, text, lengths
    return "", b"", []


def free_per_rank(comm: Communicator) -> float:
    """Return the memory that each rank may use, in B, at the time of the call.

    Collective: all ranks call it.
    """
    return float(min(comm.gather_object(free_memory() / comm.local_size)))


def check_memory(config: TrainConfig, train: Dataset, comm: Communicator, free: float) -> None:
    """Raise MemoryError if training needs more memory than a rank may use, as predicted.

    Runs for which the performance model has no formula are not checked.

    Parameters
    ----------
    config : TrainConfig
    train : Dataset
    comm : Communicator
        The ranks that train.
    free : float
        In B.
    """
    work = describe_run(config, {"data": comm.size}, describe_data(config, train, comm.size))
    one = predict(config, replace(work, threads=None), Platform.load(PLATFORM))
    if not one.reason and one.memory > free:
        raise MemoryError(
            f"{WHO}: the trial needs {memory(one.memory)} on each rank, and each may use "
            f"{memory(free)} of its host; start fewer ranks on a host, or set --recompute auto"
        )
