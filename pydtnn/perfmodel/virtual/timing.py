"""Time of training steps on many virtual ranks, with empty kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.schedules.network import Network
from pydtnn.kernels.dry import dry_backend
from pydtnn.perfmodel.compute.base import ComputeCosts
from pydtnn.perfmodel.engine.processor import Processor
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.virtual.alike import DifferentError, run_alike
from pydtnn.perfmodel.virtual.disturbances import NONE, Disturbances
from pydtnn.perfmodel.virtual.run import run_virtual
from pydtnn.perfmodel.workload import Rank, Workload, check_timed, period
from pydtnn.utils import clock

MAX_DIFFERENT_RANKS = 64
"""Ranks that can be executed one by one."""

WARM_UP = 1
"""Steps before those that are timed: the first ones create groups and buffers."""


@dataclass(frozen=True)
class Timing:
    """Time of training steps.

    Attributes
    ----------
    workload : Workload
    steps : tuple of float
        Time of each step, from the end of the step before to the end on the last rank, in s.
    alone : float or None
        Time of a sample on one rank, in s; None if the network is cut.
    alike : bool
        Whether one rank was executed for all.
    """

    workload: Workload
    steps: tuple[float, ...]
    alone: float | None
    alike: bool

    @property
    def seconds(self) -> float:
        """Mean time of a step in s."""
        return sum(self.steps) / len(self.steps)

    @property
    def efficiency(self) -> float:
        """Samples per second and rank, as a fraction of those of one rank; 0 if not known."""
        if self.alone is None:
            return 0.0
        return self.workload.batch * self.alone / (self.workload.ranks * self.seconds)


def time_steps(
    workload: Workload,
    platform: Platform,
    costs: ComputeCosts | Sequence[ComputeCosts],
    *,
    steps: int = 4,
    disturbances: Disturbances = NONE,
) -> Timing:
    """Execute training steps on virtual ranks with kernels that do nothing.

    If all ranks make the same collective calls, as those of data parallelism do, one of them is
    executed for all; otherwise each of at most 64.

    Parameters
    ----------
    workload : Workload
    platform : Platform
    costs : ComputeCosts or sequence of ComputeCosts
        Time of computation, of every rank or of each.
    steps : int
        Steps to execute, rounded up to a multiple of the period of the scheme.
    disturbances : Disturbances, optional

    Raises
    ------
    ValueError
        If the ranks differ and are too many, or the workload is not possible.
    """
    check_timed(workload)
    network = platform.network(workload.ranks)
    disturbances.check(network)
    length = period(workload)
    program = _program(workload, length * -(-WARM_UP // length), length * -(-steps // length))
    processor, alike = Processor.of(platform), True
    cut = [*workload.axes] not in ([], ["data"])
    first = costs if isinstance(costs, ComputeCosts) else costs[0]
    uneven = workload.batch % workload.data
    try:
        if uneven or cut:
            raise DifferentError("parts of the network or of the batch that differ between ranks")
        ends, _ = run_alike(
            program,
            network=network,
            costs=first,
            processor=processor,
            disturbances=disturbances,
        )
        slowest = np.array(ends)
    except DifferentError as error:
        if workload.ranks > MAX_DIFFERENT_RANKS:
            raise ValueError(
                f"timing only: expected at most {MAX_DIFFERENT_RANKS} ranks, which are executed "
                f"one by one because of {error}, got {workload.ranks}; use fewer ranks, or data "
                "parallelism with collective calls only"
            ) from error
        run = run_virtual(
            program,
            network=network,
            costs=costs,
            processor=processor,
            disturbances=disturbances,
        )
        slowest, alike = np.max(run.results, axis=0), False
    alone = None if cut else _alone(workload, first)
    return Timing(workload, tuple(np.diff(slowest).tolist()), alone, alike)


def _program(workload: Workload, warm_up: int, steps: int) -> Callable[[Communicator], list[float]]:
    """Return a function that runs steps, and returns the time before the first and after each."""

    def run(comm: Communicator) -> list[float]:
        backend = dry_backend(workload.create_backend(), threshold=1)
        rank = Rank(workload, comm, backend=backend)
        rank.trainer.optimizer.iterations = 1  # the first step checks values of gradients
        for _ in range(warm_up):
            rank.step()
        ends = [clock.now()]
        for _ in range(steps):
            rank.step()
            ends.append(clock.now())
        return ends

    return run


def _alone(workload: Workload, costs: ComputeCosts) -> float:
    """Return the time of a sample on one rank, in s."""
    batch = max(1, workload.batch // workload.data)
    plain: dict[str, Any] = {"scheme": "allreduce", "scheme_options": {}, "compress": None}
    one = replace(workload, axes={}, batch=batch, **plain)
    network = Network.create([0], latency=0.0, bandwidth=1.0)
    ends, _ = run_alike(
        _program(one, WARM_UP, 1), network=network, costs=costs, processor=Processor()
    )
    return (ends[-1] - ends[0]) / batch
