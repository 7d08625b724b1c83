"""Execution of a run on virtual ranks, and the lines of its report about virtual time."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from pydtnn.cli.config import TrainConfig, read_axes, typed
from pydtnn.comm import Communicator
from pydtnn.parallel.mesh import without_shard
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.units import align

if TYPE_CHECKING:
    from pydtnn.cli.build import Job
    from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
    from pydtnn.tools.perfmodel.platform import Platform
    from pydtnn.tools.perfmodel.virtual.steps import Timing
    from pydtnn.training.workload import Workload


STEPS = 4
"""Steps that `timing_only` executes, unless --steps-per-epoch is given."""

MAX_THREADS = 1024
"""Virtual ranks that can be threads of a process."""


def run_on_virtual_ranks(
    config: TrainConfig, comm: Communicator, program: Callable[[Communicator], Any]
) -> None:
    """Call `program(comm)` on every virtual rank, or print the time of steps (`timing_only`).

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
    from pydtnn.tools.perfmodel.platform import Platform
    from pydtnn.tools.perfmodel.virtual import Processor, run_virtual
    from pydtnn.tools.perfmodel.virtual.disturbances import NONE, Disturbances

    assert config.virtual_ranks is not None
    assert config.platform is not None
    if comm.size > 1:
        raise AgreedError(
            f"train: --virtual-ranks requires one process, got {comm.size}; start it without mpirun"
        )
    platform = Platform.load(config.platform)
    disturbances = NONE if config.disturb is None else Disturbances.load(config.disturb)
    costs = create_costs(config, platform)
    if config.timing_only:
        from pydtnn.tools.perfmodel.virtual.steps import time_steps

        workload = describe_virtual_run(config)
        steps = config.steps_per_epoch or STEPS
        timing = time_steps(workload, platform, costs, steps=steps, disturbances=disturbances)
        print("\n".join(align(_timing_rows(timing, platform), 2)), flush=True)
        return
    if config.virtual_ranks > MAX_THREADS:
        raise ValueError(
            f"train: --virtual-ranks must be at most {MAX_THREADS}, got {config.virtual_ranks}; "
            f"use --virtual-ranks {config.virtual_ranks}:timing_only=true"
        )
    run_virtual(
        program,
        network=platform.network(config.virtual_ranks),
        costs=costs,
        processor=Processor.of(platform),
        disturbances=disturbances.on(platform, config.virtual_ranks),
    )


def create_costs(config: TrainConfig, platform: Platform) -> AnalyticCosts:
    """Return the time of computation, by the rates of the platform."""
    from pydtnn.cli.build import create_optimizer
    from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
    from pydtnn.training.workload import clipping_of

    own, given = platform.compute.threads, config.threads
    if config.timing_only and given not in (None, own):
        raise ValueError(
            f"train: --virtual-ranks timing_only has the times of a rank of {own} threads, got "
            f"--threads {given}; omit it, or measure a platform with it: python -m pydtnn calibrate"
        )
    rule = create_optimizer(config, 1, 1)
    slots, clipping = len(rule.slots), clipping_of(rule)
    return AnalyticCosts(platform, config.dtype, slots=slots, clipping=clipping)


def describe_virtual_run(config: TrainConfig) -> Workload:
    """Return the description of a run on the virtual ranks, of which steps are timed.

    Raises
    ------
    ValueError
        If the axes do not multiply to the number of ranks, or steps with an option are not timed.
    """
    from pydtnn.cli.workload import create_data, describe_data, describe_run
    from pydtnn.training.workload import TIMED, first_unknown

    ranks = config.virtual_ranks or 1
    axes = read_axes(config.parallel) or {"data": ranks}
    if prod(axes.values()) != ranks:
        raise ValueError(
            f"train: --parallel must multiply to the {ranks} virtual ranks, got {config.parallel}"
        )
    axes, _ = without_shard(axes)
    data = describe_data(config, create_data(config)[0], axes["data"])
    work = describe_run(config, axes, data)
    if name := first_unknown(work, TIMED):
        option = typed(config, name)
        raise ValueError(
            f"train: --virtual-ranks timing_only has no times of {option}; omit one of them"
        )
    return work


def _timing_rows(timing: Timing, platform: Platform) -> list[tuple[str, str]]:
    workload, steps = timing.workload, [1e3 * seconds for seconds in timing.steps]
    executed = "one rank is executed, which stands for all" if timing.alike else "all are executed"
    efficiency = f"{timing.efficiency:.0%} of the samples/s of as many single ranks"
    return [
        ("ranks", f"{workload.ranks} on {platform.name}; only timed: {executed}"),
        *_notes(platform, workload.ranks),
        ("batch", f"{workload.batch} samples of all ranks"),
        ("virtual time per step", f"{1e3 * timing.seconds:.4g} ms"),
        ("shortest and longest", f"{min(steps):.4g} ms, {max(steps):.4g} ms of {len(steps)} steps"),
        ("samples/s", f"{workload.batch / timing.seconds:.0f}"),
        *([] if timing.alone is None else [("efficiency", efficiency)]),
    ]


def _notes(platform: Platform, ranks: int) -> list[tuple[str, str]]:
    note = platform.check_hosts(ranks)
    return [("note", note)] if note else []


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
    from pydtnn.tools.perfmodel.platform import Platform

    steps, ranks = len(job.trainer.losses), job.config.virtual_ranks
    if ranks is None or not wall or not steps:
        return []
    efficiency, beside = alone / wall, max(clock.now() - wall, 0.0)
    return [
        ("virtual time per step", f"{1e3 * wall / steps:.4g} ms on {job.config.platform}"),
        ("virtual time beside it", f"{beside:.4g} s: start, evaluation, averages, checkpoints"),
        *_notes(Platform.load(str(job.config.platform)), ranks),
        (
            "speed-up",
            f"{ranks * efficiency:.1f} over one rank with as many samples per step as each of "
            f"these: efficiency {efficiency:.0%}",
        ),
    ]
