"""Work that is executed on rank 0 only, such as writing a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydtnn.comm import Communicator, agree

T = TypeVar("T")


def on_rank_0(comm: Communicator, work: Callable[..., T], *args: object) -> T | None:
    """Call ``work(*args)`` on rank 0; the others wait until it is done.

    Collective: all ranks call it.

    Returns
    -------
    object
        What `work` returns, on rank 0; None on the others.

    Raises
    ------
    AgreedError
        On all ranks, if `work` raises on rank 0.
    """
    result, error = None, None
    if comm.rank == 0:
        try:
            result = work(*args)
        except Exception as problem:  # whatever it is, the other ranks must not wait for it
            error = problem
    agree(comm, error)
    return result
