"""The performance model for a run: the choice of ``--parallel auto``, and its prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

from pydtnn.cli.build import (
    Job,
    create_network,
    create_network_for,
    create_optimizer,
)
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.data import create_data
from pydtnn.cli.predicted import (
    Predicted,
    create_projector,
    no_formula,
    predict,
    strategy_of,
)
from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.data.loader import samples_of_step
from pydtnn.kernels import create_backend
from pydtnn.layers import Net
from pydtnn.layers.collectives import PIPELINE
from pydtnn.model.recomputing import AUTO
from pydtnn.perfmodel.choice import explain, plan_lines, ranked
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.quick import platform_of
from pydtnn.perfmodel.search import Found, search
from pydtnn.perfmodel.strategy import Strategy
from pydtnn.perfmodel.task import Task
from pydtnn.training.checks import DEFAULT_PER_STAGE
from pydtnn.utils import plain_yaml
from pydtnn.utils.units import parse_size

WORTH = 1.05
"""Time of the best uniform plan over that of one that cuts layers differently, to use the latter:
the error of the model."""


def create_task(
    config: TrainConfig,
    net: Net,
    input_shape: tuple[int, ...],
    global_batch: int,
    samples: int,
    slots: int,
) -> Task:
    """Return what a run trains.

    Parameters
    ----------
    config : TrainConfig
    net : Net
        Not part of a model; it is not changed.
    input_shape : tuple of int
    global_batch, samples : int
        Samples of a step and of an epoch.
    slots : int
        Values of the optimizer per parameter.
    """
    return Task(
        net,
        input_shape,
        config.model,
        global_batch,
        samples,
        slots,
        config.dtype,
        bucket_bytes=config.bucket_bytes,
        clips=config.clip_norm is not None,
        averages=config.ema is not None,
        loader_threads=config.loader_threads,
    )


def find_platform(
    config: TrainConfig, comm: Communicator, threads: int, task: Task
) -> Platform | None:
    """Return the platform of a run. Collective: all ranks call it.

    That of `--platform`, otherwise the one of this job: measured, or from the user's cache; None
    for devices that are not measured.
    """
    if config.platform is not None:
        return Platform.load(config.platform)
    if config.device != "cpu":
        return None
    tuning = config.tuning or ("fixed" if config.exact else None)
    backend = create_backend("cpu", threads=threads, tuning=tuning)
    batch = ceil(task.global_batch / comm.size)
    return platform_of(comm, backend, task.net, task.input_shape, batch)


def choose_parallel(
    config: TrainConfig, comm: Communicator, threads: int
) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with the chosen strategy, and lines that explain the choice.

    Collective: all ranks call it. The choice is made on rank 0.

    Raises
    ------
    AgreedError
        On all ranks, if the model has no formula for the options, or nothing fits into memory.
    """
    option = no_formula(config)
    if option:
        raise ValueError(
            f"train: --parallel auto has no formula for {option}; name the axes, such as "
            "--parallel data=2"
        )
    about = comm.gather_object(on_rank_0(comm, _describe_data, config, comm.size))[0]
    batch = about[3]
    optimizer = create_optimizer(config, batch, 1)
    net, slots = create_network_for(config, *about[1:3]), len(optimizer.slots)
    task = create_task(config, net, about[2], batch, about[0], slots)
    platform = find_platform(config, comm, threads, task)
    whole = optimizer.per_parameter
    found = on_rank_0(comm, _choose, config, comm.size, platform, task, whole)
    chosen, lines = comm.gather_object(found)[0]
    return replace(config, **chosen), lines


def _describe_data(config: TrainConfig, ranks: int) -> tuple[int, int, tuple[int, ...], int]:
    """Return number of samples, classes and shape of the training set, and samples of a step."""
    train, _ = create_data(config)
    create_network(config, train)  # raises for a data set without classes
    batch = samples_of_step(train, ranks, config.batch_size, config.global_batch_size)
    return len(train), int(train.classes or 0), train.input_shape, batch


def _choose(
    config: TrainConfig, ranks: int, platform: Platform, task: Task, whole: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the fastest strategy, and why it was chosen."""
    limit = platform.cluster.memory_per_rank
    if config.memory_limit is not None:
        limit = min(limit, parse_size("train: --memory-limit", config.memory_limit))
    base = strategy_of(config, {}, None)
    batch = task.global_batch
    projector = create_projector(task, platform)
    found = search(
        projector,
        ranks,
        memory_limit=limit,
        recompute=(None, AUTO) if config.recompute is None else (base.recompute,),
        base=base,
        allowed=_allowed(batch, whole),
    ).prefer_uniform(WORTH)
    details = [*ranked(found), *plan_lines(found.best)]
    lines = [f"parallel: {explain(found, limit)}", *(f"  {line}" for line in details)]
    return _options(config, found, batch, limit), lines


def _allowed(batch: int, whole: bool) -> Callable[[Strategy], bool]:
    """Return a function: whether training with a strategy is possible.

    Parameters
    ----------
    batch : int
    whole : bool
        Whether the update rule requires whole parameters.
    """

    def possible(strategy: Strategy) -> bool:
        if whole and any(axis not in ("spatial", PIPELINE) for axis in strategy.cut):
            return False
        return strategy.stages <= batch // strategy.data

    return possible


def _options(config: TrainConfig, found: Found, batch: int, limit: float) -> dict[str, Any]:
    """Return the options of the command line for the best strategy."""
    best = found.best.strategy
    chosen: dict[str, Any] = {
        "parallel": best.parallel if best.cut else None,
        "plan": None if best.plan is None else plain_yaml.dump(best.plan),
        "global_batch_size": batch,
    }
    if best.stages > 1 and config.micro_batches is None:
        chosen["micro_batches"] = min(DEFAULT_PER_STAGE * best.stages, batch // best.data)
    if config.recompute is None and best.recompute is not None:
        chosen["recompute"] = AUTO
        chosen["memory_limit"] = config.memory_limit or f"{int(limit)}B"
    elif config.recompute != AUTO:
        chosen["memory_limit"] = None  # a limit of recomputation
    return chosen


def add_prediction(job: Job, threads: int) -> None:
    """Predict a run on rank 0. Collective: all ranks call it.

    Runs that report nothing, and virtual ones, are not predicted; neither are those that measure
    nothing, unless `--platform` names the platform.
    """
    config, comm = job.config, job.trainer.comm
    if config.quiet or config.evaluate_only or config.virtual_ranks is not None:
        return
    platform, task = None, _task_of(job)
    if _measures(config) and not no_formula(config):
        platform = find_platform(config, comm, threads, task)
    if comm.rank == 0:
        job.predicted = predict_job(job, task, platform)


def _task_of(job: Job) -> Task:
    config, train = job.config, job.train
    net, slots = create_network(config, train), len(job.trainer.optimizer.slots)
    return create_task(config, net, train.input_shape, job.global_batch_size, len(train), slots)


def _measures(config: TrainConfig) -> bool:
    """Return whether the platform of a run is named, or may be measured."""
    return config.platform is not None or config.tuning in (None, "measure")


def predict_job(job: Job, task: Task, platform: Platform | None) -> Predicted:
    """Predict a run. What cannot be predicted is not an error: the result has the reason."""
    config, trainer = job.config, job.trainer
    if platform is None and not no_formula(config) and config.tuning != "direct":
        return Predicted(reason=f"--tuning {config.tuning} measures nothing; name a --platform")
    mesh = trainer.setup.mesh
    axes = {"data": trainer.comm.size} if mesh is None else mesh.shape
    try:
        return predict(config, task, axes, platform)
    except Exception as error:  # a prediction must never end training
        return Predicted(reason=f"{type(error).__name__}: {error}")
