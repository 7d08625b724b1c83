"""Steps of a run on virtual ranks, with empty kernels: their times, and the memory of each rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm, prod
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.schedules.rule import without_rule
from pydtnn.data.batch import parts
from pydtnn.kernels.dry import dry_backend
from pydtnn.layers import Net
from pydtnn.model.memory import PROCESS_BYTES, Forecast
from pydtnn.parallel.schemes import ShardedGradients
from pydtnn.tools.perfmodel.compression import temporary_memory
from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.tools.perfmodel.compute.base import ComputeCosts
from pydtnn.tools.perfmodel.engine.cores import SharedCores
from pydtnn.tools.perfmodel.engine.processor import Processor
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.prediction import MemoryUse, Prediction, RankPrediction, StepTime
from pydtnn.tools.perfmodel.virtual.clock import RankClock
from pydtnn.tools.perfmodel.virtual.communicator import VirtualCommunicator
from pydtnn.tools.perfmodel.virtual.disturbances import NONE
from pydtnn.tools.perfmodel.virtual.run import run_virtual
from pydtnn.tools.perfmodel.workload_rank import WorkloadRank, check_timed, period
from pydtnn.training.workload import Workload
from pydtnn.utils import clock

WHO = "predict"

MAX_RANKS = 16
"""Largest number of ranks of which a prediction has all, and of kinds of ranks otherwise."""

WARM_UP = 2
"""Steps before those that are timed: the first ones create groups and buffers."""

STEPS = 6
"""Steps of which the pair with the median time is predicted: ranks may be late in every second one.
Of schemes with longer periods it is one of half as many periods."""


def predict(
    workload: Workload | str | Callable[..., Net],
    platform: Platform | str | Path,
    costs: ComputeCosts | Sequence[ComputeCosts] | None = None,
    **options: Any,
) -> Prediction:
    """Predict the time and memory of a step: virtual ranks execute it with empty kernels.

    Parameters
    ----------
    workload : Workload, str or callable
        Of at most 16 ranks, or of any number that are alike: "data" is the first axis, and ranks
        repeat along it after at most 16. Or a model, as in `Workload`.
    platform : Platform, str or Path
        A platform, its name or its file.
    costs : ComputeCosts or sequence of ComputeCosts, optional
        Time of compute, or that of each rank; by default from the rates of the platform.
    **options
        Of a model: the other parameters of `Workload`, such as `input_shape`, `batch` and `axes`.

    Raises
    ------
    ValueError
        If there are too many ranks, or the workload is not possible.
    TypeError
        If an option does not exist.
    """
    if not isinstance(workload, Workload):
        workload = Workload(workload, **options)
    elif options:
        raise TypeError(
            f"{WHO}: expected options as arguments of the Workload, got {', '.join(options)}; use "
            "dataclasses.replace(workload, ...)"
        )
    if not isinstance(platform, Platform):
        platform = Platform.load(platform)
    alike = _alike(workload, platform) if workload.ranks > MAX_RANKS else None
    check_timed(workload)
    costs = AnalyticCosts.of(workload, platform) if costs is None else costs
    network, processor = platform.network(workload.ranks), Processor.of(platform)
    usual = platform.compute.threads if isinstance(costs, AnalyticCosts) else 1
    threads = workload.threads or usual  # those for which the costs are
    cores = SharedCores.of(platform, 2 * alike if alike else workload.ranks, threads)
    given = {"cores": cores, "disturbances": NONE.on(platform, workload.ranks), "alike": alike}
    ranks = simulate(replace(workload, threads=threads), network, costs, processor, **given)
    state = max(rank.memory.parameters + rank.memory.slots for rank in ranks)
    return Prediction(workload, platform, tuple(ranks), state)


def _alike(workload: Workload, platform: Platform) -> int:
    """Return the number of ranks after which those that do the same follow.

    Raises
    ------
    ValueError
        If they do not, or are too many.
    """
    ranks, shards = workload.ranks, workload.data * workload.accumulation
    kinds = lcm(ranks // workload.data, platform.cluster.ranks_per_host)
    whole = not (ranks % kinds or workload.batch % shards or platform.factors(ranks))
    split = next(iter(workload.axes)) != "data" or workload.scheme_options.get("copies", 1) != 1
    if kinds > min(MAX_RANKS, ranks // 2) or not whole or split:
        raise ValueError(
            f"{WHO}: expected at most {MAX_RANKS} ranks, or so many kinds of ranks that repeat "
            f"along a first axis data on equal hosts, got {ranks}; use the oracle"
        )
    return kinds


def simulate(
    workload: Workload,
    network: Network,
    costs: ComputeCosts | Sequence[ComputeCosts],
    processor: Processor,
    **options: Any,
) -> list[RankPrediction]:
    """Execute steps on virtual ranks with empty kernels; return the mean step of the median pair.

    If communication repeats with a longer period, it is that of the median period.

    Parameters
    ----------
    workload : Workload
    network : Network
        With the host of every rank.
    costs : ComputeCosts or sequence of ComputeCosts
    processor : Processor
        What messages cost the processor of a rank.
    **options
        Of `run_virtual`: cores, disturbances, alike.
    """
    temporary = 0.0
    if workload.compress:
        temporary = temporary_memory(workload.compress, workload.compress_options)
    length = max(period(workload), 2)

    def run(comm: Communicator) -> tuple[list[StepTime], MemoryUse]:
        backend = dry_backend(workload.create_backend(), threshold=1)
        rank = WorkloadRank(workload, comm, backend=backend)
        rank.trainer.optimizer.iterations = 1  # the first step checks values of gradients
        for _ in range(length * -(-WARM_UP // length)):
            rank.step()
        own = cast(RankClock, clock.current())
        own.take()
        times = []
        for _ in range(STEPS // 2):
            for _ in range(length):
                rank.step()
            times.append(own.take(length))
        largest = max((bucket.grads.nbytes for bucket in rank.trainer.model.buckets), default=0)
        library = cast(VirtualCommunicator, without_rule(comm)).buffers.most
        return times, rank_memory(rank, library + int(temporary * largest))

    done = run_virtual(run, network=network, costs=costs, processor=processor, **options)
    steps = list(zip(*(times for times, _ in done.results), strict=True))
    middle = sorted(steps, key=lambda ranks: max(step.seconds for step in ranks))[len(steps) // 2]
    memory = [memory for _, memory in done.results]
    return [RankPrediction(t, m) for t, m in zip(middle, memory, strict=True)]


def rank_memory(rank: WorkloadRank, library: int) -> MemoryUse:
    """Predict the memory of a rank by running its passes without computation.

    Parameters
    ----------
    rank : Rank
        After its first steps, which have created the buffers of its exchange. It may have a dry
        backend.
    library : int
        Memory of the communicator's library for messages, and of temporary arrays of compression,
        in B.
    """
    trainer = rank.trainer
    model, optimizer = trainer.model, trainer.optimizer
    if rank.uses_up:
        model.share_gradients()
    forecast = Forecast(model, rank.largest, 0, rank.in_flight, rank.halved).memory(model.cuts)
    process = PROCESS_BYTES if model.backend.name == "cpu" else 0
    held = forecast.resident - forecast.scratch - process
    flat = forecast.parameters + forecast.copies + forecast.gradients
    scheme, passes = trainer.exchange, trainer.accumulation
    values, grads = scheme.released(passes) if isinstance(scheme, ShardedGradients) else (0, 0)
    batch = sum(np.asarray(part).nbytes for part in (*parts(rank.batch.x), rank.batch.y))
    passed = sum(prod(node.shape) for node in model.graph.inputs) * rank.largest
    passed *= model.dtype.itemsize  # the forecast has the samples of one pass
    return MemoryUse(
        parameters=forecast.parameters + forecast.copies - values,
        gradients=forecast.gradients - grads,
        slots=sum(kept.values.nbytes for kept in optimizer.stored()),
        activations=max(held - flat - passed, 0) + batch,
        scratch=forecast.scratch,
        messages=_own_arrays(scheme, [model, optimizer, *model.buckets]) + library,
        process=process,
    )


STOPS = (type, ModuleType, FunctionType, str, bytes, int, float)
"""Objects without arrays of their own."""


def _own_arrays(root: object, others: Sequence[object]) -> int:
    """Return the bytes of all arrays that an object refers to, without those of other objects."""
    known = {id(one) for one in others}
    pending, total = [root], 0
    while pending:
        one = pending.pop()
        simulated = type(one).__module__.startswith("pydtnn.tools.perfmodel")  # no part of the run
        if id(one) in known or isinstance(one, STOPS) or simulated:
            continue
        known.add(id(one))
        if isinstance(one, np.ndarray):
            total += one.nbytes if one.base is None else 0
        else:
            pending += gc.get_referents(one)
    return total
