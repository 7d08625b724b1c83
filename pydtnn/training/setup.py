"""The parts of a training run that steps, evaluation and the search for NaN use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.data import Batch, Dataset, Loader
from pydtnn.model import Model
from pydtnn.model.pipeline.schedules import is_asynchronous
from pydtnn.optimizers import Optimizer
from pydtnn.optimizers.loss_scale import LossScale
from pydtnn.parallel.exchange import AllReduce, GathersParameters, GradientExchange
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.sums import Sums, average
from pydtnn.training.axis_sums import further_axes
from pydtnn.training.mesh import choose_exchange, choose_mesh, create_parts, group_of_copies
from pydtnn.training.metric_sums import Totals
from pydtnn.training.objective import Objective
from pydtnn.utils import clock
from pydtnn.utils.arguments import enclose, represent
from pydtnn.utils.observer import NO_ACTIVITY, Kind, Observer, combine
from pydtnn.utils.validate import check_int


@dataclass(frozen=True)
class Setup:
    """The parts of a training run that do not change during training.

    Attributes
    ----------
    model : Model
    optimizer : Optimizer
    exchange : GradientExchange
    objective : Objective
        Losses, metrics and their names.
    loss_scale : LossScale or None
        Factor on the loss of a float16 model.
    sync_batch_norm : bool
        Whether batch norm normalises with the statistics of the whole batch of all ranks.
    mesh : Mesh or None
        The ranks, if the network is distributed too.
    accumulation, micro_batches : int, int or None
        As they are given to `Trainer`.
    observer : Observer or None
        Receives what training does.
    """

    model: Model
    optimizer: Optimizer
    exchange: GradientExchange
    objective: Objective
    loss_scale: LossScale | None
    sync_batch_norm: bool
    mesh: Mesh | None = None
    accumulation: int = 1
    micro_batches: int | None = None
    observer: Observer | None = None

    @property
    def comm(self) -> Communicator:
        """All ranks."""
        return self.exchange.comm if self.mesh is None else self.mesh.comm

    @property
    def data(self) -> Communicator:
        """The ranks that have other samples than this one: the communicator of the exchange."""
        return self.exchange.comm

    @property
    def equal_statistics(self) -> bool:
        """Whether all ranks have the same running statistics after every step."""
        return self.sync_batch_norm or self.exchange.sums.shards is not None

    @property
    def equal_numbers(self) -> bool:
        """Whether ranks must compute equally many shards, of which some may have no samples.

        Each pass gathers parameters, or determines the order in which stages sum gradients.
        """
        return isinstance(self.exchange, GathersParameters) or self.model.pipeline is not None

    @property
    def asynchronous(self) -> bool:
        """Whether steps overlap, with two versions of the weights: `AsynchronousSteps`."""
        stage = self.model.pipeline
        return stage is not None and is_asynchronous(self.model.schedule, stage.ranks)

    @property
    def own_losses(self) -> bool:
        """Whether a step computes the losses of this rank only, and others may be elsewhere."""
        return not self.exchange.sums_losses and self.data.size > 1

    def phase(self, name: str, number: int = -1) -> AbstractContextManager[None]:
        """Return the context of a phase, which the observer receives; see `Observer.begin`."""
        observer = self.observer  # as the function `phase`, without a further call
        return NO_ACTIVITY if observer is None else observer.activity(Kind.PHASE, name, number)

    def report_samples(self, samples: int) -> None:
        """Report to the observer how many samples the following passes compute."""
        if self.observer is not None:
            self.observer.samples(samples)

    def count_targets(self, batch: Batch) -> list[float] | None:
        """Return the samples per counted target for each loss; None if losses count samples.

        Both are those of all ranks if they compute a step together, otherwise of this rank.
        Collective in the first case.
        """
        shapes = [(len(batch), *shape) for shape in self.model.output_shapes]
        counts, samples = self.objective.counts(shapes, batch.y), len(batch)
        if counts is None:
            return None
        if self.exchange.sums_losses:
            samples = batch.total
            with self.phase("loss"):
                self.data.allreduce(counts)
        return [samples / count if count else 0.0 for count in counts.tolist()]

    def update(self) -> None:
        """Exchange gradients or parameters, and update the parameters.

        Whatever a scheme does outside of `Optimizer.step` is in a phase "exchange", too.
        """
        self.exchange.met = False
        with self.phase("exchange"):
            self.exchange.update(self.optimizer)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Context in which model, optimizer and communicators report to the observer."""
        parts = (self.model, self.optimizer)
        if self.observer is None or self.model.observer is self.observer:  # or in this context
            yield
            return
        self.observer.layers({node.name: node.layer for node in self.model.graph.nodes})
        for part in parts:
            part.observer = self.observer
        self.comm.observe(self.observer)
        try:
            yield
        finally:
            self.comm.observe(None)
            for part in parts:
                part.observer = None

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context in which a signal ends training after a step, if signals are handled."""
        supervision = self.comm.supervision
        if supervision is None:
            yield
            return
        supervision.last_step.start()
        try:
            yield
        finally:
            supervision.last_step.stop()

    def new_totals(self, xp: Any = np) -> Totals:
        """Return sums of the loss and the metrics, initially 0, as arrays of a module."""
        objective = self.objective
        return Totals(objective.names, xp, objective.results, objective.sizes)

    def to_host(self, totals: Totals) -> Totals:
        """Copy sums to the host when they are complete."""
        result = self.new_totals()
        result.values[:] = self.model.backend.to_numpy(totals.values)
        return result

    def synchronise(self) -> None:
        """Make running statistics equal on all ranks: see `Trainer.synchronise`."""
        statistics = self.model.statistics
        if self.equal_statistics or not statistics.statistics:
            return
        with statistics.constant():
            average(self.data, [statistics.running], statistics.samples)
        statistics.samples = 0.0

    def bucket_bytes(self, total: int, usual: int) -> tuple[int, ...]:
        """Return the lengths of buckets, in B, which depend on the hosts of the ranks.

        They are the usual one in exact training, whose results must not depend on the partition,
        for messages between GPUs, and for ranks that sum gradients along further axes of the mesh,
        whose groups along "data" may have other hosts, as those of two ranks with the same stages.

        Parameters
        ----------
        total : int
            Size of all gradients, in B.
        usual : int
            Length within a host.

        Returns
        -------
        tuple of int
            Lengths in the order in which backward completes the buckets; the last one applies to
            all following buckets.
        """
        further = any(further_axes(p.group) for p in self.model.parameters.values())
        one_host = self.data.local_size == self.data.size
        exact = self.exchange.sums.shards is not None
        found: tuple[int, ...] = (usual,)
        if not (one_host or further or exact or self.data.capturable):
            from pydtnn.comm.schedules.rule import bucket_bytes

            found = bucket_bytes(self.data.hosts, total, usual)
        copies = group_of_copies(self.model, self.mesh)
        if copies is not None and len(set(copies.gather_object(found))) > 1:
            return (usual,)
        return found

    def loader(self, dataset: Dataset, batch_size: int, shards: int, **options: Any) -> Loader:
        """Create the loader of this rank's part of a data set for the model's device."""
        return Loader(
            dataset,
            global_batch_size=batch_size,
            shards=shards,
            rank=self.data.rank,
            size=self.data.size,
            dtype=self.model.dtype,
            raw=self.model.backend.images is not None,
            cuts=[node.part for node in self.model.graph.inputs],
            observer=self.observer,
            **options,
        )


def create_setup(
    model: Model,
    optimizer: Optimizer,
    objective: Objective,
    exchange: GradientExchange | None,
    mesh: Mesh | None,
    observer: Observer | None,
    **options: Any,
) -> Setup:
    """Return the parts of a run, with the default mesh and scheme: see `Setup` and `Trainer`."""
    for name in ("accumulation", "micro_batches"):
        if options[name] is not None:
            check_int("Trainer", name, options[name], at_least=1)
    mesh = choose_mesh(model, mesh)
    model.cut_outputs = mesh is not None and objective.cut(model.output_nodes, mesh)
    objective.unread = model.unread_outputs or objective.unread  # which other stages only evaluate
    loss_scale = LossScale(model.backend) if model.dtype == np.float16 else None
    exchange = choose_exchange(exchange, mesh)
    supervision = (exchange.comm if mesh is None else mesh.comm).supervision
    if supervision is not None:
        observer = combine([*filter(None, [observer]), supervision.activity])
    virtual = clock.virtual()
    if isinstance(virtual, Observer):  # first, since others may read a clock that it advances
        observer = combine([virtual, *filter(None, [observer])])
    parts = model, optimizer, exchange, objective, loss_scale
    return Setup(*parts, mesh=mesh, observer=observer, **options)


def may_use_up(setup: Setup) -> bool:
    """Return whether each bucket can be updated in backward, and its gradients be given up.

    That is for a rank alone on a CPU, whose step has no part that reads all gradients.
    """
    optimizer, exchange, supervision = setup.optimizer, setup.exchange, setup.comm.supervision
    plain = all(
        getattr(type(optimizer), method) is getattr(Optimizer, method)
        for method in ("step", "begin_step", "step_bucket")
    )
    return (
        plain
        and setup.comm.size == 1
        and setup.mesh is None
        and setup.observer is (None if supervision is None else supervision.activity)
        and setup.loss_scale is None
        and setup.model.backend.name != "cuda"
        and (type(exchange), type(exchange.sums)) == (AllReduce, Sums)
        and not optimizer.needs_all_gradients
    )


def bind_optimizer(setup: Setup, uses_up: bool) -> None:
    """Choose the model's buckets for the exchange, and bind the optimizer to its parameters.

    `uses_up` is whether gradients are given up in backward.
    """
    model, optimizer = setup.model, setup.optimizer
    model.choose_buckets(setup.bucket_bytes)
    if uses_up:
        model.share_gradients()
    optimizer.bind(model.backend, model.buffers, setup.exchange)
    optimizer.groups.check(model.parameter_names)
    optimizer.scale_loss(setup.loss_scale)
    optimizer.rounding = None  # of the model of another trainer
    if model.formats is not None and model.formats.optimizer is not None:
        optimizer.round_state(model.formats.optimizer, model.seed)
    copies = group_of_copies(model, setup.mesh)  # created before the first step
    optimizer.distribute(create_parts(setup.mesh, 1 if copies is None else copies.size))


def represent_setup(setup: Setup, callbacks: Sequence[object], epoch: int) -> str:
    """Represent a trainer by its parts with their options, the model in one line."""
    losses, metrics = setup.objective.losses, setup.objective.metrics
    several = len(losses) > 1
    parts = {
        "loss": list(losses) if several else losses[0],
        "metrics": list(map(list, metrics)) if several else list(metrics[0]),
        "exchange": setup.exchange,
        "mesh": setup.mesh,
        "callbacks": list(callbacks),
    }
    heading = repr(setup.model).partition("\n")[0]
    shown = [f"{name}={represent(part)}" for name, part in parts.items() if part]
    state = f"epoch={epoch}"
    return enclose("Trainer(", [f"<{heading}>", repr(setup.optimizer), *shown, state], ")")
