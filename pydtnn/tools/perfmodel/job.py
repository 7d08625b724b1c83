"""The performance model of a job that runs: its platform, and the prediction of its steps.

The platform is measured, or taken from the user's cache. `python -m pydtnn calibrate` measures
more: layers of many classes, and the disk.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
from collections import Counter
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path

from pydtnn.cli.step_meter import AWAY, BUSY, MAX_SPREAD
from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.kernels import Backend
from pydtnn.tools.perfmodel.calibration import calibrate
from pydtnn.tools.perfmodel.calibration.rates import training
from pydtnn.tools.perfmodel.compute.measured import measure_job
from pydtnn.tools.perfmodel.compute.profile import MeasuredCosts
from pydtnn.tools.perfmodel.engine.cores import SharedCores
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.prediction import Prediction
from pydtnn.tools.perfmodel.virtual.steps import MAX_RANKS, STEPS, predict
from pydtnn.tools.perfmodel.workload_rank import TIMED, first_unknown, layers_of
from pydtnn.training.workload import Workload
from pydtnn.utils.machine import cpu_model

MAX_FLOPS = 200e9
"""Operations with which the rates of layers are measured, in several steps: about 3 s of a core."""

MAX_JOB_FLOPS = 400e9
"""Operations of a rank with which the compute of a run is measured: some seconds, as long as other
work on a machine may slow it down."""

MIN_REPEATS, MAX_REPEATS = 3, 25
"""Steps of the largest and of small networks."""

MIN_RATE = 1e-12
"""Learning rate of steps that are measured."""


def platform_of(
    comm: Communicator, backend: Backend, work: Workload, *, rates: bool = True
) -> Platform:
    """Return the platform of a job, with the rates of its network's layers. Collective.

    For the rates, all ranks execute training steps of the whole network at the same time, each with
    its part of the batch. Later jobs with the same CPU, threads, ranks and hosts, and for the rates
    the same network, batch and optimizer, take the platform from a file of the user's cache, which
    is not written if the machine is under load.

    Parameters
    ----------
    comm : Communicator
    backend : Backend
        With compiled kernels on the host.
    work : Workload
        Of which the network, batch and optimizer count, not how ranks share it.
    rates : bool, default True
        Whether rates are needed: not if the compute of the run is measured.

    Returns
    -------
    Platform
        Equal on all ranks.
    """
    batch = ceil(work.batch / comm.size)
    same = {name: getattr(work, name) for name in ("fusion", "optimizer", "optimizer_options")}
    network = (repr(work.create_net()), work.input_shape, batch, *same.values()) if rates else ()
    same |= {"model_options": work.model_options, "threads": backend.threads}
    alone = Workload(work.model, work.input_shape, work.classes, **same)
    place = _file(comm, backend, *network)
    known: Platform | None = comm.gather_object(_load(place) if comm.rank == 0 else None)[0]
    if known is not None:
        return known
    flops = max(_flops(work, backend), 1)
    samples = max(1, min(batch, int(MAX_FLOPS / MIN_REPEATS / flops)))
    measured = _with_fixed_parameters(replace(alone, batch=samples))
    calibration = calibrate(
        comm,
        name="this job",
        backend=backend,
        networks=partial(training, "training steps", measured),
        repeats=_repeats(samples * flops),
        rates=rates,
    )
    gc.collect()
    if comm.rank == 0 and place is not None and not calibration.spreads:
        with contextlib.suppress(OSError):  # a cache that is not writable is not an error
            calibration.platform.save(place)
    return calibration.platform


def measurable(comm: Communicator, work: Workload) -> bool:
    """Return whether `predict_job` predicts a run."""
    return work.ranks == comm.size <= MAX_RANKS and not first_unknown(work, TIMED)


def predict_job(
    comm: Communicator, work: Workload, platform: Platform, most: int = MAX_REPEATS
) -> Prediction | None:
    """Predict a run of this job's ranks, with the compute of all of them. Collective.

    The ranks execute a few steps of the run at the same time, each its part and without messages
    (`perfmodel.compute.measured`). Virtual ranks then repeat these steps with messages.

    Parameters
    ----------
    comm : Communicator
    work : Workload
        For which `measurable` is true.
    platform : Platform
        That of the job.
    most : int
        Steps that are measured; of large networks less.

    Returns
    -------
    Prediction or None
        None on other ranks than 0.

    Raises
    ------
    ValueError
        On all ranks, if the machine is under load: the measured steps differ too much, or ranks
        are without a core for too long.
    AgreedError
        On all ranks, if the steps cannot be simulated.
    """
    flops = _flops(work, work.create_backend())
    steps = _repeats(flops * work.batch / comm.size, most, MAX_JOB_FLOPS)
    shared = SharedCores.of(platform, work.ranks, work.threads or 1) is not None
    profile = measure_job(_with_fixed_parameters(work), comm, steps=steps, warm_up=1, shared=shared)
    gc.collect()  # the measured ranks refer to themselves: their memory is not the run's
    if (away := max(own.away for own in profile.ranks)) > MAX_SPREAD:
        raise ValueError(AWAY.format(away))
    if profile.spread > MAX_SPREAD:
        raise ValueError(BUSY.format(profile.spread))

    def simulated() -> Prediction:
        steps = profile.typical(STEPS)
        costs = [MeasuredCosts(own, varying=True) for own in steps.ranks]
        return replace(predict(work, platform, costs), deciles=profile.deciles())

    return on_rank_0(comm, simulated)


def _repeats(flops: float, most: int = MAX_REPEATS, total: float = MAX_FLOPS) -> int:
    """Return how often a step of so many operations is measured."""
    return max(MIN_REPEATS, min(most, int(total / max(flops, 1))))


def _with_fixed_parameters(work: Workload) -> Workload:
    """Return a run that hardly changes parameters, which follow random numbers and overflow."""
    options = dict(work.optimizer_options)
    if "lr" in options:
        options["lr"] = MIN_RATE
    return replace(work, optimizer_options=options)


def _flops(work: Workload, backend: Backend) -> int:
    """Return the operations of forward and backward of one sample."""
    costs = [layer.cost(1) for layer in layers_of(work, backend)]
    return sum(cost.flops_forward + cost.flops_backward for cost in costs)


def _file(comm: Communicator, backend: Backend, *workload: object) -> Path | None:
    """Return the path of the file, of format "2", in the cache; None without a home directory."""
    per_host = sorted(Counter(comm.hosts).values())
    tuning = backend.autotuner.mode
    about = ("2", cpu_model(), backend.isa, backend.threads, tuning, per_host, *workload)
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    try:
        return backend.autotuner.file.path.with_name(f"platform-{key}.yaml")
    except RuntimeError:
        return None


def _load(place: Path | None) -> Platform | None:
    """Return the platform in a file; None if there is none that is valid."""
    if place is not None and place.is_file():
        with contextlib.suppress(OSError, ValueError):
            return Platform.load(place)
    return None
