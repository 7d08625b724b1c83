"""A short training run with ranks as threads and a timeout."""

from __future__ import annotations

from collections.abc import Callable

from pydtnn.comm import Communicator, create_communicator
from pydtnn.data import ArrayDataset
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import AllReduce
from pydtnn.testing.ranks import run_within
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

    def rank(comm: Communicator) -> Course:
        return Rank(comm, ledgers[comm.rank], scheme, optimizer, data, plan).run()

    def where(rank: int) -> str:
        return ledgers[rank].where()

    hosts = [rank // 2 for rank in range(ranks)]
    return run_within(ranks, rank, where, timeout=timeout, hosts=hosts)
