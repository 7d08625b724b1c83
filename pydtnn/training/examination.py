"""The first reading of samples from files: checksums, checks of samples, and statistics."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add
from typing import Any, TypeVar

import numpy as np

from pydtnn.comm import Communicator, agree
from pydtnn.comm.agree import name_ranks
from pydtnn.data import Dataset, Loader, Subset
from pydtnn.data.batch import parts
from pydtnn.data.loader import read_samples
from pydtnn.data.order import rank_slice
from pydtnn.data.statistics import PixelSums, chunk_rows, pixel_sums
from pydtnn.kernels.autotuner import Table
from pydtnn.layers import StepContext
from pydtnn.model import Model
from pydtnn.model.model import example_inputs
from pydtnn.parallel.pipeline import actions_of
from pydtnn.parallel.pipeline.check import most_in_flight
from pydtnn.training import checks
from pydtnn.training.mesh import share_loaded, share_replicas
from pydtnn.training.metric_sums import History, Logs, Totals
from pydtnn.training.setup import Setup
from pydtnn.utils.errors import EXPLAINED, AgreedError
from pydtnn.utils.observer import Observer, phase
from pydtnn.utils.validate import check_int

COMPARED_SAMPLES = 16
"""Samples of a data set that are compared."""


def check_data(comm: Communicator, datasets: Sequence[tuple[str, Dataset | None]]) -> None:
    """Raise AgreedError if data sets differ between ranks. Collective: all ranks call it.

    A few evenly spaced samples are read, and their checksums, types and shapes are compared. If a
    data set returns different values when read twice, because it applies augmentation, only types
    and shapes are compared.

    Parameters
    ----------
    comm : Communicator
    datasets : sequence of (str, Dataset or None)
        Description, such as "training set", and data set, of equal length on all ranks.

    Raises
    ------
    AgreedError
        On all ranks, naming those that differ from rank 0.
    """
    if comm.size == 1:
        return
    present = [(what, data) for what, data in datasets if data is not None]
    everywhere = comm.gather_object([_of_data(data) for _, data in present])
    for number, (what, data) in enumerate(present):
        prints = [own[number] for own in everywhere]
        same = all(first == second for _, first, second in prints)  # each rank read twice
        own = [(kind, first if same else None) for kind, first, _ in prints]
        _raise_if_different(
            own,
            f"the samples of the {what} {data.name}",
            "give every rank the same data, in the same order",
        )


def check_loaded(comm: Communicator, loaded: str | None, *, before_broadcast: bool) -> None:
    """Raise AgreedError if ranks have loaded different weights. Collective: all ranks call it.

    Parameters
    ----------
    comm : Communicator
    loaded : str or None
        `Model.loaded`.
    before_broadcast : bool
        Whether rank 0's weights will be sent to all ranks, so that the others may have loaded none.

    Raises
    ------
    AgreedError
        On all ranks, naming those that differ from rank 0.
    """
    if comm.size == 1:
        return
    own = comm.gather_object(loaded)
    if before_broadcast:
        own = [own[0] if other is None else other for other in own]
    _raise_if_different(own, "the weights that were loaded", "load the same file on every rank")


def _raise_if_different(prints: Sequence[Any], what: str, advice: str) -> None:
    others = [rank for rank, value in enumerate(prints) if value != prints[0]]
    if others:
        raise AgreedError(
            f"Trainer: {what} differ on {name_ranks(others)} from those on rank 0; {advice}"
        )


def _of_data(data: Dataset) -> tuple[str, str, str]:
    """Return types and shapes of samples, and the checksums of reading some of them twice."""
    rows = np.unique(np.linspace(0, len(data) - 1, COMPARED_SAMPLES).astype(np.int64))
    read = [[*map(parts, read_samples(data, rows))] for _ in range(2)]
    kinds = [f"{a.dtype} {a.shape}" for arrays in read[0] for a in arrays]
    first, second = (_checksum([a for arrays in both for a in arrays]) for both in read)
    return ", ".join(kinds), first, second


def _checksum(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# Common choice of algorithms by all ranks, before the first step.
#
# One rank of each kind of machine (CPU, build, instruction set, threads), or one group of ranks
# that have the network together, runs a step on generated data, in which its backend measures every
# key that is not in its cache file. The table is then sent to all ranks of that kind, and nothing
# is measured afterwards: all ranks use the same algorithms, also for the last smaller batch and
# evaluations, and checkpoints contain the choices.

_log = logging.getLogger("pydtnn.training")


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
    reads = model.stage.reads if model.stage else None
    inputs = example_inputs(model.graph, model.input_shapes, batch, rng, reads)
    xs = tuple(backend.asarray(x, dtype) for x in inputs)
    context = StepContext(training=training, samples=np.arange(batch))
    y, residuals = model.forward(xs, context, keep=training)
    if training:
        outputs = y if isinstance(y, tuple) else (y,)
        model.backward(tuple(backend.asarray(np.ones(a.shape, dtype)) for a in outputs), residuals)
    model.statistics.begin_step()


T = TypeVar("T")


def examine(comm: Communicator, *datasets: Dataset | None, threads: int = 1) -> None:
    """Read all files once, each rank its share, unless they are known.

    Files are compared with their checksums (`Dataset.verify`), and all samples are read
    (`Dataset.examined`). The deadline of a wait applies to each part of both: a file system that
    does not respond ends the run.

    Collective: all ranks call it. Statistics of a training set are those of all its samples, with
    the same bytes for any number of ranks: sums of integers. There are no messages for data sets
    that need no examination (`Dataset.examined`).

    Parameters
    ----------
    comm : Communicator
    *datasets : Dataset or None
    threads : int
        Threads of this rank that read; 0 is 1.

    Raises
    ------
    AgreedError
        On all ranks, if a rank cannot read a sample.
    """
    for dataset in _originals(datasets):
        states = comm.gather_object((dataset.verified, dataset.examined))
        verified, examined = (all(column) for column in zip(*states, strict=True))
        if verified and examined:
            continue
        sums, problem = pixel_sums(dataset.read, dataset.input_shape, range(0)), None
        activity = comm.supervision.activity if comm.supervision is not None else None
        share = rank_slice(len(dataset), comm.rank, comm.size)
        with phase(activity, "examination"):  # others may wait for its end as long as it proceeds
            try:
                if not verified:
                    for _ in _timed(activity, dataset.verify(comm.rank, comm.size)):
                        pass
                if not examined:
                    sums = reduce(add, _timed(activity, _read(dataset, share, threads)), sums)
            except EXPLAINED as error:
                problem = error
            agree(comm, problem)
        dataset.verified = True
        total = reduce(add, comm.gather_object(sums))
        if not examined and dataset.like is None and "statistics" not in vars(dataset):
            dataset.statistics = total.statistics()
        dataset.examined = True


def _originals(datasets: tuple[Dataset | None, ...]) -> list[Dataset]:
    """Return the data sets to examine, those of subsets instead of them, each once."""
    found: dict[int, Dataset] = {}
    for dataset in datasets:
        while isinstance(dataset, Subset):
            dataset = dataset.like
        if dataset is not None and dataset.examined is not None:
            found[id(dataset)] = dataset
    return list(found.values())


def _timed(activity: Observer | None, parts: Iterator[T]) -> Iterator[T]:
    """Yield the parts of a long work; the deadline of a wait applies to each."""
    while True:
        with phase(activity, "examination"):
            try:
                part = next(parts)
            except StopIteration:
                return
        yield part


def _read(dataset: Dataset, share: slice, threads: int) -> Iterator[PixelSums]:
    """Read the samples of this rank, and yield sums of their pixels."""
    rows = chunk_rows(dataset.input_shape)
    chunks = [
        range(start, min(start + rows, share.stop))
        for start in range(share.start, share.stop, rows)
    ]
    with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="pydtnn-loader") as pool:
        yield from pool.map(
            lambda chunk: pixel_sums(dataset.read, dataset.input_shape, chunk), chunks
        )


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
    together, in_flight = (shards if setup.sync_batch_norm else 1), 1
    if (stage := model.stage) is not None:
        actions = actions_of(setup.schedule, stage.number, stage.count, shards)
        in_flight = most_in_flight(actions)
    error: Exception | None = None
    try:
        slots = len(setup.optimizer.slots)
        model.choose_segments(largest * together, slots=slots, in_flight=in_flight)
    except ValueError as reason:
        error = reason
    agree(setup.comm, error)
    names = [layer.name for layer in model.layers]
    chosen = setup.comm.gather_object((names, model.cuts))
    model.cut(next(cuts for others, cuts in chosen if others == names))


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
        Of the loader: `augment`, `mix`, `steps_per_epoch`, `drop_last`.

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
    checks.check_validation(train, validation)
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
    checks.check_shards(setup, loader, accumulation)
    plan = {
        "seed": seed,
        "global_batch_size": loader.global_batch_size,
        "samples": len(train),
        "shards": setup.exchange.sums.shards or 0,
    }
    others = {"epochs": epochs, "steps": len(loader), "validated": len(validation or ())}
    checks.check_plan(setup, plan, was, **others)
    check_data(setup.comm, [("training set", train), ("validation set", validation)])
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
    setup.exchange.begin(model.buckets)
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
