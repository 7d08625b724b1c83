"""Execution of a run on virtual ranks, and the lines of its report about virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydtnn.cli.build import Job
from pydtnn.cli.config import TrainConfig, read_axes
from pydtnn.cli.workload import describe_run
from pydtnn.comm import Communicator
from pydtnn.parallel.mesh import without_shard
from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.virtual import Processor, run_virtual
from pydtnn.tools.perfmodel.virtual.disturbances import NONE, Disturbances
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError


def run_on_virtual_ranks(
    config: TrainConfig, comm: Communicator, program: Callable[[Communicator], Any]
) -> None:
    """Call `program(comm)` on every virtual rank.

    Parameters
    ----------
    config : TrainConfig
    comm : Communicator
        That of this process, which must be alone.
    program : callable

    Raises
    ------
    ValueError, OSError
        If a file is invalid, or cannot be read.
    AgreedError
        If there are several processes.
    """
    assert config.virtual_ranks is not None
    assert config.platform is not None
    if comm.size > 1:
        raise AgreedError(
            f"train: --virtual-ranks requires one process, got {comm.size}; start it without mpirun"
        )
    platform = Platform.load(config.platform)
    disturbances = NONE if config.disturb is None else Disturbances.load(config.disturb)
    axes, _ = without_shard(read_axes(config.parallel) or {"data": config.virtual_ranks})
    # the shape is not known yet, and the threads of this machine are not those of the platform
    work = describe_run(replace(config, threads=None), axes, {"input_shape": (1,)})
    run_virtual(
        program,
        network=platform.network(config.virtual_ranks),
        costs=AnalyticCosts.of(work, platform),
        processor=Processor.of(platform),
        disturbances=disturbances.on(platform, config.virtual_ranks),
    )


def describe(job: Job, alone: float, wall: float) -> list[tuple[str, str]]:
    """Return the lines of the report about virtual time.

    Parameters
    ----------
    job : Job
    alone : float
        Time of all steps without communication, mean over the ranks, in s.
    wall : float
        Time of all steps, in s.
    """
    steps, ranks = len(job.trainer.losses), job.config.virtual_ranks
    if ranks is None or not wall or not steps:
        return []
    efficiency, beside = alone / wall, max(clock.now() - wall, 0.0)
    note = Platform.load(str(job.config.platform)).check_hosts(ranks)
    return [
        ("virtual time per step", f"{1e3 * wall / steps:.4g} ms on {job.config.platform}"),
        ("virtual time beside it", f"{beside:.4g} s: start, evaluation, averages, checkpoints"),
        *([("note", note)] if note else []),
        (
            "speed-up",
            f"{ranks * efficiency:.1f} over one rank with as many samples per step as each of "
            f"these: efficiency {efficiency:.0%}",
        ),
    ]
