"""Checks of the options of a pipeline."""

from __future__ import annotations

import warnings

from pydtnn.data.loader import Loader
from pydtnn.data.order import own_shards
from pydtnn.parallel.pipeline import bubble, check
from pydtnn.training.setup import Setup
from pydtnn.utils.validate import whole

DEFAULT_PER_STAGE = 4
"""Micro-batches per stage by default; a stage then waits in at most a fifth of a step."""


def micro_batches_of(setup: Setup, accumulation: int, micro_batches: int | None) -> int:
    """Return the number of parts into which a rank divides its part of a step.

    Parameters
    ----------
    setup : Setup
    accumulation, micro_batches
        See `pydtnn.Trainer`.

    Raises
    ------
    TypeError, ValueError
        If a number is not a positive int, or not the one for this model.
    """
    accumulation = whole("Trainer", "accumulation", accumulation, at_least=1)
    if micro_batches is not None:
        micro_batches = whole("Trainer", "micro_batches", micro_batches, at_least=1)
    stage = setup.model.stage
    if stage is None:
        if micro_batches not in (None, 1):
            raise ValueError(
                f"Trainer: micro_batches={micro_batches} requires a model that is cut into the "
                "stages of a pipeline; use accumulation, or Mesh(comm, pipeline=2)"
            )
        return accumulation
    if accumulation > 1:
        raise ValueError(
            f"Trainer: the micro-batches of a pipeline accumulate gradients, so accumulation must "
            f"be 1, got {accumulation}; use micro_batches={accumulation * stage.count}"
        )
    if setup.exchange.sums.shards is not None:
        if micro_batches is not None:
            raise ValueError(
                "Trainer: in exact training the shards are the micro-batches of a pipeline, so "
                f"micro_batches must be omitted, got {micro_batches}"
            )
        return 1
    return micro_batches or DEFAULT_PER_STAGE * stage.count


def check_pipeline(setup: Setup) -> None:
    """Raise ValueError if an option is not possible with stages.

    Raises
    ------
    ValueError
    """
    if setup.model.stage is None:
        return
    if setup.sync_batch_norm:
        raise ValueError(
            "Trainer: the stages of a pipeline normalise each micro-batch by itself, so "
            "sync_batch_norm must be False; use fewer micro-batches"
        )
    if setup.loss_scale is not None:
        raise ValueError(
            "Trainer: the loss scale of a float16 model depends on the gradients of all stages of "
            "a pipeline, which is not supported; use bfloat16"
        )


def check_schedule(setup: Setup, loader: Loader) -> None:
    """Verify the order of the micro-batches, and warn if the stages mostly wait.

    Parameters
    ----------
    setup : Setup
    loader : Loader
        Loader of the training set; the last step of an epoch may have fewer micro-batches.

    Raises
    ------
    PipelineError
        If the schedule does not compute a step.
    """
    stage = setup.model.stage
    if stage is None:
        return
    samples = len(loader.dataset)
    last = samples - (len(loader) - 1) * loader.global_batch_size
    numbers = [
        len(own_shards(n, loader.shards, loader.rank, loader.size)[1]) or 1
        for n in (min(loader.global_batch_size, samples), last)
    ]
    for number in {*numbers}:
        check(setup.schedule, stage.count, number)
    micro_batches = numbers[0]
    if micro_batches < stage.count and stage.number == setup.comm.rank == 0:
        better = DEFAULT_PER_STAGE * stage.count
        warnings.warn(
            f"Trainer: {micro_batches} micro-batches keep {stage.count} stages waiting "
            f"{100 * bubble(stage.count, micro_batches):.0f} % of the time; with {better} it is "
            f"{100 * bubble(stage.count, better):.0f} %",
            stacklevel=3,
        )
