"""Ranks as threads with a time limit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from pydtnn.comm import Communicator, run_threads


def run_within(
    ranks: int,
    function: Callable[[Communicator], Any],
    where: Callable[[int], str],
    *,
    timeout: float,
    hosts: Sequence[Hashable] | None = None,
) -> list[Any]:
    """Call a function on ranks that are threads, and return their results.

    Parameters
    ----------
    ranks : int
    function : callable
    where : callable
        Returns what a rank is doing, for the message of a timeout: "in send to rank 1".
    timeout : float
        In s.
    hosts : sequence of hashable, optional
        See `run_threads`.

    Raises
    ------
    TimeoutError
        If it takes longer than `timeout` seconds.
    Exception
        Errors of `run_threads`.
    """
    comms: list[Communicator] = []
    results: list[list[Any]] = []
    errors: list[BaseException] = []

    def rank(comm: Communicator) -> Any:
        comms.append(comm)
        return function(comm)

    def run() -> None:
        try:
            results.append(run_threads(ranks, rank, hosts=hosts))
        except BaseException as error:
            errors.append(error)

    # In a thread, as a rank in an endless computation without calls cannot be terminated.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise errors[0]
    if results:
        return results[0]
    doing = "; ".join(f"rank {rank} {where(rank)}" for rank in range(ranks))
    with contextlib.suppress(RuntimeError):  # raised to end the calling thread
        comms[0].abort(1)
    raise TimeoutError(f"not finished after {timeout:g} s: {doing}")
