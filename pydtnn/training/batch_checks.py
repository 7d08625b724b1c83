"""Checks of data sets, batches and micro-batches before training."""

from __future__ import annotations

import math
import warnings

from pydtnn.data import Dataset
from pydtnn.data.inputs import check_same, same_normalization
from pydtnn.data.loader import Loader, check_dataset
from pydtnn.data.order import max_shards
from pydtnn.model import Model
from pydtnn.training.setup import Setup

DEFAULT_PER_RANK = 4
"""Micro-batches per rank of a pipeline by default; it then waits in at most a fifth of a step."""


def micro_batches_of(setup: Setup) -> int:
    """Return the number of parts into which a rank divides its part of a step."""
    pipeline = setup.model.pipeline
    if pipeline is None:
        return setup.accumulation
    if setup.exchange.sums.shards is not None:
        return 1
    return setup.micro_batches or DEFAULT_PER_RANK * pipeline.ranks


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
    pipeline = setup.model.pipeline
    if pipeline is None:
        return
    from pydtnn.model.pipeline import check

    samples = len(loader.dataset)
    last = samples - (len(loader) - 1) * loader.global_batch_size
    numbers = [
        max_shards(n, loader.shards, loader.size)
        for n in (min(loader.global_batch_size, samples), last)
    ]
    checked = {number: check(setup.model.schedule, pipeline.ranks, number) for number in {*numbers}}
    micro_batches = numbers[0]
    if micro_batches + setup.asynchronous < pipeline.ranks and setup.comm.rank == 0:
        better = DEFAULT_PER_RANK * pipeline.ranks
        warnings.warn(
            f"Trainer: {micro_batches} micro-batches keep {pipeline.ranks} stages waiting "
            f"{100 * checked[micro_batches].bubble:.0f} % of the time; with {better} it is "
            f"{100 * check(setup.model.schedule, pipeline.ranks, better).bubble:.0f} %",
            stacklevel=3,
        )


def check_validation(train: Dataset, validation: Dataset | None) -> None:
    """Check the data sets, so that the evaluation after the first epoch cannot fail.

    Raises
    ------
    TypeError, ValueError
    """
    check_dataset("Trainer", train)
    if validation is None:
        return
    check_dataset("Trainer", validation)
    if len(validation) == 0:
        raise ValueError(
            f"Trainer: expected at least one validation sample, got none in {validation.name}; "
            "use another data set, or None"
        )
    advice = "give both samples of one shape, and the same classes in the same order"
    check_same("Trainer", validation, train, "the training set", advice)


def check_order(model: Model, dataset: Dataset) -> None:
    """Raise ValueError if targets are next tokens, and outputs depend on them."""
    if dataset.next_of is not None and (layer := model.looks_ahead[dataset.next_of]):
        raise ValueError(
            f"Trainer: the targets of {dataset.name} are next tokens, which the network sees: "
            f"{layer} looks ahead; use a causal network such as gpt_nano, or --dataset masked_text"
        )


def check_samples(setup: Setup, dataset: Dataset, what: str) -> None:
    """Raise ValueError if samples or classes are not those that the model is known to be for."""
    check_dataset("Trainer", dataset)
    if setup.model.inputs is not None:
        advice = "use the same classes in the same order, the same size and the same tokenizer"
        check_same("Trainer", dataset, setup.model.inputs, what, advice)


def warn_of_statistics(setup: Setup, dataset: Dataset | None) -> bool:
    """Warn if a data set is not normalised with the statistics of the training set.

    Returns
    -------
    bool
        Whether it is not.

    Raises
    ------
    TypeError, ValueError
        If it is not a data set.
    """
    if dataset is None:
        return False
    check_dataset("Trainer", dataset)
    known = setup.model.inputs
    if known is None or same_normalization(dataset, known):
        return False
    if setup.comm.rank == 0:
        warnings.warn(
            f"Trainer: {dataset.name} is normalised with its own statistics instead of those of "
            "the training set, so its results are not meaningful; create it with like=train, as "
            "in ArrayDataset(x, y, like=train)",
            stacklevel=3,
        )
    return True


def check_shards(setup: Setup, loader: Loader, accumulation: int) -> None:
    """Raise ValueError for more micro-batches than samples, and batch norm over a single row.

    Parameters
    ----------
    setup : Setup
    loader : Loader
        Loader of the training set.
    accumulation : int
        Micro-batches of a rank.

    Raises
    ------
    ValueError
    """
    total = min(loader.global_batch_size, len(loader.dataset))
    most = -(-total // setup.data.size)
    if accumulation > most:
        what = "accumulation" if setup.model.pipeline is None else "micro_batches"
        raise ValueError(
            f"Trainer: {what} must be at most the {most} samples of a rank per step, got "
            f"{accumulation}; use at most {most}"
        )
    check_schedule(setup, loader)
    norm, counts = _narrowest_norm(setup.model), _normalised(setup, loader)
    if norm is not None and norm[1] == 1 and 1 in counts:
        which = ("each step", "the last step of an epoch")[counts.index(1)]
        raise ValueError(
            f"Trainer: {norm[0]} normalises over the samples only and requires at least 2, but in "
            f"{which}, a rank, micro-batch or shard has 1, whose variance is 0; use another batch "
            "size, fewer micro-batches or shards, sync_batch_norm=True, or steps_per_epoch to omit "
            "the last step"
        )


def _normalised(setup: Setup, loader: Loader) -> tuple[int, int]:
    """Return the samples over which batch norm normalises, in most steps and in the last one."""
    total = min(loader.global_batch_size, len(loader.dataset))
    last = len(loader.dataset) - (len(loader) - 1) * loader.global_batch_size
    parts = 1 if setup.sync_batch_norm else loader.shards
    return max(total // parts, 1), max(min(last, total) // parts, 1)


def _narrowest_norm(model: Model) -> tuple[str, int] | None:
    """Return the name and the rows per sample of the batch norm with the fewest rows."""
    rows = [
        (s.name, math.prod(node.shape[:-1]))
        for node in model.graph.nodes
        for s in node.layer.statistics
        if not s.frozen
    ]
    return min(rows, key=lambda entry: entry[1], default=None)
