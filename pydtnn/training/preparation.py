"""What `Trainer.fit` does before the first step: loader, checks, equal ranks, algorithms."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, agree
from pydtnn.data import Dataset, Loader
from pydtnn.data.comparison import check_data
from pydtnn.kernels.autotuner import Table
from pydtnn.layers import StepContext
from pydtnn.model import Model
from pydtnn.model.model import example_inputs
from pydtnn.model.pipeline import actions_of
from pydtnn.parallel.exchange import begin
from pydtnn.training import batch_checks, checks
from pydtnn.training.examination import check_loaded, examine
from pydtnn.training.logs import History, Logs
from pydtnn.training.mesh import share_loaded, share_replicas
from pydtnn.training.metric_sums import Totals
from pydtnn.training.setup import Setup
from pydtnn.utils.validate import check_int


def choose_segments(setup: Setup, loader: Loader, largest: int) -> None:
    """Choose the segments for the size of the batches. Collective: all ranks call it.

    Layers that exchange arrays do so again when they are recomputed. Ranks with the same layers
    therefore use the segments of the first of them, although their parts may differ in size.

    Parameters
    ----------
    setup : Setup
    loader : Loader
        Of the training set.
    largest : int
        Samples of the largest shard of any rank.

    Raises
    ------
    AgreedError
        On all ranks, if `memory_limit` is not possible on one of them.
    """
    model = setup.model
    if model.recompute is None:
        return
    shards = -(-loader.shards // setup.data.size)
    together = shards if setup.sync_batch_norm else 1
    in_flight = micro_batches_in_flight(setup, shards)
    error: Exception | None = None
    try:
        slots = setup.optimizer.state_size + setup.asynchronous  # a second version of the weights
        model.choose_segments(largest * together, slots=slots, in_flight=in_flight)
    except ValueError as reason:
        error = reason
    agree(setup.comm, error)
    names = [layer.name for layer in model.layers]
    chosen = setup.comm.gather_object((names, model.cuts))
    model.cut(next(cuts for others, cuts in chosen if others == names))


def micro_batches_in_flight(setup: Setup, shards: int) -> int:
    """Return the micro-batches whose saved values exist at a time on this rank, rounded up."""
    pipeline = setup.model.pipeline
    if pipeline is None:
        return 1
    from pydtnn.model.pipeline.check import max_in_flight

    return ceil(
        max_in_flight(actions_of(setup.model.schedule, pipeline.rank, pipeline.ranks, shards))
    )


def halved_in_flight(setup: Setup, shards: int) -> int:
    """Return those of them that are between the halves of backward, rounded up."""
    pipeline = setup.model.pipeline
    if pipeline is None:
        return 0
    from pydtnn.model.pipeline.check import max_halved

    return ceil(max_halved(actions_of(setup.model.schedule, pipeline.rank, pipeline.ranks, shards)))


def prepare(
    setup: Setup,
    train: Dataset,
    validation: Dataset | None,
    was: Mapping[str, int],
    *,
    batch_size: int,
    epochs: int,
    accumulation: int,
    loader_threads: int,
    seed: int,
    **options: Any,
) -> tuple[Loader, dict[str, int]]:
    """Create the loader of the training set, and check everything before the first step.

    Collective: all ranks call it.

    Parameters
    ----------
    setup : Setup
    train, validation : Dataset
    was : mapping
        The plan of the continued training, if any.
    batch_size : int
        Samples of all ranks per step.
    accumulation : int
        Micro-batches of a rank.
    epochs, loader_threads, seed
        See `Trainer.fit`.
    **options
        Of the loader: `augment`, `mix`, `targets`, `steps_per_epoch`, `drop_last`.

    Returns
    -------
    loader : Loader
    plan : dict
        The plan of the batches, equal on all ranks and to that of the continued training.

    Raises
    ------
    TypeError, ValueError
        If the data sets, sizes and options do not fit together.
    AgreedError
        On all ranks, if plans or data differ, or the model's memory limit is not possible.
    """
    batch_checks.check_validation(train, validation)
    if was:
        batch_checks.check_samples(setup, train, "the training to continue")
    batch_checks.check_order(setup.model, train)
    checks.check_trainable(setup.model)
    examine(setup.comm, train, validation, threads=loader_threads)
    loader = setup.loader(
        train,
        batch_size,
        setup.exchange.sums.shards or setup.data.size * accumulation,
        threads=max(loader_threads, 1),
        prefetch=2 * loader_threads,
        seed=seed,
        **options,
    )
    batch_checks.check_shards(setup, loader, accumulation)
    plan = {
        "seed": seed,
        "global_batch_size": loader.global_batch_size,
        "samples": len(train),
        "shards": setup.exchange.sums.shards or 0,
    }
    others = {"epochs": epochs, "steps": len(loader), "validated": len(validation or ())}
    checks.check_plan(setup, plan, was, **others)
    named = [("training set", train), ("validation set", validation)]
    check_data(setup.comm, "Trainer", named)
    choose_segments(setup, loader, -(-min(loader.global_batch_size, len(train)) // loader.shards))
    return loader, plan


def start_equal(setup: Setup) -> None:
    """Start the exchange, and make parameters and running statistics those of rank 0.

    Collective: all ranks call it.

    Raises
    ------
    AgreedError
        On all ranks, if they have loaded different weights.
    """
    model = setup.model
    check_loaded(setup.comm, model.loaded, before_broadcast=True)
    share_loaded(setup.mesh, model)
    share_replicas(setup.mesh, model)
    begin(setup.exchange, model.buckets)
    for buffer in model.frozen_buffers:
        setup.data.broadcast(buffer.values)
    if model.statistics.statistics:
        setup.data.broadcast(model.statistics.running)


def read_position(setup: Setup, state: Mapping[str, Any]) -> tuple[int, int, History, Totals]:
    """Return epoch, step, history and sums of a trainer's state.

    Raises
    ------
    ValueError
        If it has other metrics, or invalid numbers.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"Trainer.load: expected the result of Trainer.state, got {state!r}; use "
            "pydtnn.training.checkpoint.load_checkpoint(path, trainer)"
        )
    totals = setup.new_totals()
    if tuple(state["metrics"]) != totals.names:
        raise ValueError(
            f"Trainer: metrics must be {', '.join(state['metrics'])}, as in the training to "
            f"continue, got {', '.join(totals.names)}; continue with the same metrics"
        )
    epoch, step = (
        check_int("Trainer", name, state[name], at_least=0) for name in ("epoch", "step")
    )
    totals.load(state["totals"])
    return epoch, step, History(Logs(logs) for logs in state["history"]), totals


_log = logging.getLogger("pydtnn.training")


# Common choice of algorithms by all ranks, before the first step.
#
# One rank of each kind of machine (CPU, build, instruction set, threads), or one group of ranks
# that have the network together, runs a step on generated data, in which its backend measures every
# key that is not in its cache file. The table is then sent to all ranks of that kind, and nothing
# is measured afterwards: all ranks use the same algorithms, also for the last smaller batch and
# evaluations, and checkpoints contain the choices.


def autotune(model: Model, comm: Communicator, batch: int, *, training: bool) -> None:
    """Select the same algorithms on all ranks. Collective: all ranks call it.

    Parameters
    ----------
    model : Model
        Gradients and the statistics of a step are overwritten.
    comm : Communicator
    batch : int
        Samples of the largest pass of any rank.
    training : bool
        Whether backward is used.
    """
    autotuner, begin = model.backend.autotuner, time.perf_counter()
    kinds = comm.gather_object(autotuner.kind)
    if not any(kinds):
        return
    table = autotuner.open()
    first = _is_first(model, comm, kinds)
    if first:
        alone = model.mesh is None or not model.mesh.model_axes
        with contextlib.suppress(*([Exception] if alone else [])):  # raised again by the first step
            _rehearse(model, batch, training)
        model.backend.trim()  # memory of candidates that were not selected
    tables: dict[str, Table] = {}
    for kind, own in comm.gather_object((autotuner.kind, table if first else {})):
        merged = tables.setdefault(kind, {}) if kind else {}
        for what, batches in own.items():  # ranks with other parts have measured other keys
            merged[what] = {**batches, **merged.get(what, {})}
    autotuner.freeze(tables)
    _log.debug("choice of algorithms: %.2f s", time.perf_counter() - begin)
    for key, choice in autotuner.report().items():
        _log.debug("%s: %s", key, choice)


def _is_first(model: Model, comm: Communicator, kinds: Sequence[str | None]) -> bool:
    """Return whether this rank measures: the first of its kind.

    If the network is distributed, the first ranks that have it together do, of each combination of
    kinds: their layers exchange arrays.
    """
    mesh, own = model.mesh, kinds[comm.rank]
    if mesh is None or not mesh.model_axes:
        return own is not None and kinds.index(own) == comm.rank
    places = comm.gather_object(mesh.position)
    groups: dict[int, list[str | None]] = {}
    for kind, place in zip(kinds, places, strict=True):
        groups.setdefault(place["data"], []).append(kind)
    mine = mesh.position["data"]
    return mine == min(place for place, group in groups.items() if group == groups[mine])


@np.errstate(all="ignore")
def _rehearse(model: Model, batch: int, training: bool) -> None:
    """Run one step of the model, without loss and update."""
    rng = np.random.default_rng(0)
    backend, dtype = model.backend, model.dtype
    inputs = example_inputs(model, batch, rng)
    xs = tuple(backend.asarray(x, dtype) for x in inputs)
    context = StepContext(training=training, samples=np.arange(batch))
    y, residuals = model.forward(xs, context, keep=training)
    if training:
        outputs = y if isinstance(y, tuple) else (y,)
        dys = tuple(backend.asarray(np.ones(a.shape, dtype)) for a in outputs)
        if model.pipeline is None:
            model.backward_shards([dys], [residuals], shared=True)  # with gradients where they are
        else:
            model.pipeline.backward(model.backward_shards, dys, residuals)
    model.statistics.begin_step()
