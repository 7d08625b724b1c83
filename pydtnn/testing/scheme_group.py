"""A short training run on ranks that are threads, which always ends."""

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
    """Train on one rank, as without any scheme."""
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
    """Train on so many ranks, of which every two share a host.

    Raises
    ------
    TimeoutError
        If it lasts longer than `timeout` seconds: which rank was in which call.
    Exception
        Whatever `run_threads` raises.
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

    # From a thread, as a rank that computes without end and without a call cannot be ended.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise errors[0]
    if results:
        return results[0]
    doing = "; ".join(f"rank {r} {ledger.where()}" for r, ledger in enumerate(ledgers))
    with contextlib.suppress(RuntimeError):  # which is how it ends the thread that calls it
        comms[0].abort(1)
    raise TimeoutError(f"not finished after {timeout:g} s: {doing}")
