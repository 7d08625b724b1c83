"""A short training run with ranks as threads and a timeout."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from pydtnn.comm import Communicator, create_communicator, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import AllReduce
from pydtnn.testing.scheme_course import Course, Plan
from pydtnn.testing.scheme_rank import Rank, Scheme
from pydtnn.testing.scheme_watch import Ledger


def run_serial(optimizer: Callable[[], Optimizer], data: ArrayDataset, plan: Plan) -> Course:
    """Train on one rank without a scheme."""
    comm = create_communicator("serial")
    return Rank(comm, Ledger(), AllReduce, optimizer, data, plan).run()


def run_ranks(
    ranks: int,
    scheme: Scheme,
    optimizer: Callable[[], Optimizer],
    data: ArrayDataset,
    plan: Plan,
    *,
    timeout: float,
) -> list[Course]:
    """Train on a number of ranks, with two ranks per host.

    Raises
    ------
    TimeoutError
        If it takes longer than `timeout` seconds, with the current call of each rank.
    Exception
        Errors of `run_threads`.
    """
    ledgers = [Ledger() for _ in range(ranks)]
    comms: list[Communicator] = []
    results: list[list[Course]] = []
    errors: list[BaseException] = []

    def rank(comm: Communicator) -> Any:
        comms.append(comm)
        return Rank(comm, ledgers[comm.rank], scheme, optimizer, data, plan).run()

    def run() -> None:
        try:
            results.append(run_threads(ranks, rank, hosts=[r // 2 for r in range(ranks)]))
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
    doing = "; ".join(f"rank {r} {ledger.where()}" for r, ledger in enumerate(ledgers))
    with contextlib.suppress(RuntimeError):  # raised to end the calling thread
        comms[0].abort(1)
    raise TimeoutError(f"not finished after {timeout:g} s: {doing}")
