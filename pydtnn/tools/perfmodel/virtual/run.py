"""Execution of a program on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm.communicator import Communicator, be_rank
from pydtnn.comm.schedules import Algorithm
from pydtnn.comm.schedules.rule import by_rule, create_allreduce
from pydtnn.comm.thread import start_ranks
from pydtnn.tools.perfmodel.compute.base import ComputeCosts, NoCosts
from pydtnn.tools.perfmodel.engine.cores import SharedCores
from pydtnn.tools.perfmodel.engine.engine import Engine
from pydtnn.tools.perfmodel.engine.processor import Processor
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.virtual.clock import RankClock
from pydtnn.tools.perfmodel.virtual.communicator import VirtualCommunicator, VirtualGroup
from pydtnn.tools.perfmodel.virtual.disturbances import NONE, Disturbances
from pydtnn.utils.clock import now, use

IDLE = Processor()
"""A processor that messages cost nothing."""


MAX_DIFFERENCE = 0.01
"""Of the times of ranks that are alike: their parts of arrays may differ by a unit."""


class VirtualRun(NamedTuple):
    """Result of `run_virtual`.

    Attributes
    ----------
    results : list
        Return value of the function on each rank.
    seconds : list of float
        Virtual time at which each rank has ended, in s.
    """

    results: list[Any]
    seconds: list[float]


def run_virtual(
    function: Callable[..., Any],
    *args: Any,
    network: Network,
    costs: ComputeCosts | Sequence[ComputeCosts],
    processor: Processor = IDLE,
    disturbances: Disturbances = NONE,
    cores: SharedCores | None = None,
    alike: int | None = None,
) -> VirtualRun:
    """Call `function(comm, *args)` on virtual ranks, which are threads of this process.

    The ranks compute what ranks of a job would compute, and each has a clock (`pydtnn.utils.clock`)
    that shows when it would do so: computation advances it by `costs`, messages by the time that
    they take on `network`. Results and times are the same in every run. Allreduces follow
    `pydtnn.comm.schedules.rule`, as over MPI.

    Parameters
    ----------
    function : callable
    *args
        Arguments of `function`, shared by all ranks.
    network : Network
        With the host of every rank.
    costs : ComputeCosts or sequence of ComputeCosts
        Time of computation, of all ranks or of each.
    processor : Processor, optional
        What messages cost the processor of a rank; by default nothing.
    disturbances : Disturbances, optional
    cores : SharedCores, optional
        Cores that ranks share; by default each has its own, and `costs` are the times there.
    alike : int, optional
        Ranks after which those that do the same follow, on equal hosts: the first two of each kind
        are executed, and the result has the first one. Values are not those of all ranks.

    Returns
    -------
    VirtualRun

    Raises
    ------
    RankError
        If a rank raises: the first error, with its rank; the other ranks are terminated.
        An `AgreedError` is raised unchanged.
    RuntimeError
        If all ranks wait for each other.
    ValueError
        If ranks that should be alike are not.
    """
    disturbances.check(network)
    engine = Engine(network, cores, alike)
    ranks = engine.executed
    everyone = VirtualGroup(engine, processor, "all", range(len(network.hosts)))
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        own = costs if isinstance(costs, ComputeCosts) else costs[rank]
        clock = RankClock(engine, rank, own, disturbances)
        use(clock)
        try:
            comm = by_rule(VirtualCommunicator(everyone, rank))
            be_rank(comm)
            results[rank] = function(comm, *args)
        except BaseException as error:  # whatever it is, the other ranks must not wait for it
            engine.leave(rank, error)
        else:
            engine.leave(rank)

    start_ranks(ranks, run, engine.end)
    seconds, failure = [engine.clock(rank) for rank in range(ranks)], engine.failure
    if alike and (failure or not np.allclose(seconds[:alike], seconds[alike:], MAX_DIFFERENCE, 0)):
        why = failure or "those of a kind end at different times"
        raise ValueError(f"run_virtual: the ranks are not alike: {why}; use fewer") from failure
    if failure is not None:
        raise failure
    return VirtualRun(results[:alike], seconds[:alike])


def sum_seconds(algorithm: str | Algorithm, nbytes: int, network: Network) -> float:
    """Return the time of an allreduce whose ranks start together, by one of its algorithms, in s.

    >>> network = Network.create("abcd", latency=1e-4, bandwidth=1e8)
    >>> round(sum_seconds("ring", 4_000_000, network), 6)  # 2 (P-1) (1e-4 + 1e6 / 1e8)
    0.0606
    """

    def program(comm: Communicator) -> float:
        scheduled = create_allreduce(algorithm, comm)
        comm.barrier()
        begin = now()
        scheduled.allreduce(np.zeros(nbytes, "uint8"))
        return now() - begin

    return max(run_virtual(program, network=network, costs=NoCosts()).results)
