"""Execution of a run on virtual ranks, and the lines of its report about virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydtnn.cli.config import TrainConfig
from pydtnn.comm import Communicator
from pydtnn.utils.errors import AgreedError

if TYPE_CHECKING:
    from pydtnn.cli.build import Job
    from pydtnn.perfmodel.virtual import VirtualRun


def run_on_virtual_ranks(
    config: TrainConfig, comm: Communicator, program: Callable[[Communicator], Any]
) -> VirtualRun:
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
    """
    from pydtnn.perfmodel.platform import Platform
    from pydtnn.perfmodel.virtual import Processor, run_virtual
    from pydtnn.perfmodel.virtual.peaks import PeakCosts

    assert config.virtual_ranks is not None
    assert config.platform is not None
    if comm.size > 1:
        raise AgreedError(
            f"train: --virtual-ranks requires one process, got {comm.size}; start it without mpirun"
        )
    platform = Platform.load(config.platform)
    return run_virtual(
        program,
        network=platform.network(config.virtual_ranks),
        costs=PeakCosts(platform, config.dtype),
        processor=Processor.of(platform),
    )


def describe_virtual(job: Job, alone: float, wall: float) -> list[tuple[str, str]]:
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
    efficiency = alone / wall
    return [
        ("virtual time per step", f"{1e3 * wall / steps:.4g} ms on {job.config.platform}"),
        (
            "speed-up",
            f"{ranks * efficiency:.1f} over one rank with as many samples per step as each of "
            f"these: efficiency {efficiency:.0%}",
        ),
    ]
