"""A rank of a workload that executes steps without data, for times and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, Serial
from pydtnn.comm.schedules.rule import create_allreduce
from pydtnn.data import Batch
from pydtnn.data.batch import each, has_several_inputs
from pydtnn.data.order import assign_shards
from pydtnn.kernels import Backend
from pydtnn.kernels.dry import dry_backend
from pydtnn.layers.base import Layer
from pydtnn.model.graph import Graph, shapes_of
from pydtnn.model.model import example_input, example_inputs
from pydtnn.parallel.mesh import Mesh
from pydtnn.training.preparation import halved_in_flight, micro_batches_in_flight
from pydtnn.training.trainer import Trainer
from pydtnn.training.workload import WHO, Workload
from pydtnn.utils.observer import Observer

TIMED: dict[str, tuple[Any, ...]] = {
    "exact": (False,),
    "freeze": ((),),
    "device": ("cpu",),
    "tuning": (None, "measure", "fixed"),
}
"""Values that steps of `WorkloadRank` have, of fields that are limited."""


def first_unknown(work: Workload, known: Mapping[str, tuple[Any, ...]]) -> str:
    """Return the first field whose value is not one of the known ones; empty if there is none."""
    return next((name for name, values in known.items() if getattr(work, name) not in values), "")


def check_timed(work: Workload) -> None:
    """Raise ValueError if `WorkloadRank` cannot run a value, or there are too few samples."""
    if name := first_unknown(work, TIMED):
        raise ValueError(
            f"{WHO}: {name} must be {' or '.join(map(repr, TIMED[name]))} for steps that are timed "
            f"or measured, got {getattr(work, name)!r}; omit it"
        )
    work.samples_per_rank  # noqa: B018  raises ValueError


class WorkloadRank:
    """A rank of a workload that is ready for training steps. Collective: all ranks construct it.

    Steps are those of `Trainer.train_step` on one batch of random numbers, without a loader.

    Parameters
    ----------
    workload : Workload
    comm : Communicator
        Of as many ranks as the workload has.
    backend : Backend, optional
    observers : sequence of Observer

    Attributes
    ----------
    trainer : Trainer
    batch : Batch
    largest : int
        Samples of the largest pass.
    in_flight, halved : int
        Micro-batches whose saved values exist at a time, and those of them that are between the
        halves of backward.
    """

    def __init__(
        self,
        workload: Workload,
        comm: Communicator,
        *,
        backend: Backend | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        if comm.size != workload.ranks:
            raise ValueError(
                f"{WHO}: expected {workload.ranks} ranks for {workload.name}, got {comm.size}; use "
                "other axes"
            )
        check_timed(workload)
        comm, self.uses_up = create_allreduce(workload.allreduce, comm), workload.uses_up
        mesh = Mesh(comm, **workload.axes) if workload.axes else None
        data = comm if mesh is None else mesh.data
        backend = backend or workload.create_backend()
        model = workload.create_model(workload.create_net(), backend, mesh)
        self.trainer = Trainer(
            model,
            workload.create_optimizer(),
            metrics=(),
            exchange=workload.create_exchange(data),
            progress=False,
            observers=observers,
            check_equal=0,
            auxiliary_weights=[1.0] * (len(model.output_shapes) - 1) or None,
            **workload.trainer_options(),
        )
        self.trainer.exchange.start(model.buckets)
        self.batch = self._create_batch(workload, data)
        setup, passes = self.trainer.setup, max(len(self.batch.shards), 1)
        self.in_flight = micro_batches_in_flight(setup, passes)
        self.halved = halved_in_flight(setup, passes)
        if model.recompute is not None:  # for this batch size, as `Trainer.fit` chooses
            slots = self.trainer.optimizer.state_size
            model.choose_segments(self.largest, slots=slots, in_flight=self.in_flight)

    def _create_batch(self, workload: Workload, data: Communicator) -> Batch:
        """Create this rank's part of the batch, and of its samples."""
        parts = self.trainer.accumulation
        rows, shards = assign_shards(workload.batch, data.size * parts, data.rank, data.size)
        self.largest = -(-workload.batch // (data.size * parts))
        samples = np.arange(workload.batch)[rows]
        rng = np.random.default_rng(data.rank)
        model = self.trainer.model
        node = model.graph.inputs[0]
        shape = workload.input_shape if node.part is None else node.shape
        x: Any = (
            example_inputs(model, len(samples), rng)
            if has_several_inputs(shape)
            else example_input(node, shape, len(samples), rng)
        )
        positions = model.output_shape[:-1]  # of sequences
        y = rng.integers(workload.classes, size=(len(samples), *positions))
        x = each(lambda part: part.astype(model.dtype), x)
        return Batch(x, y, samples, 0, workload.batch, shards if parts > 1 else ())

    def step(self) -> None:
        """Run a training step. Collective: all ranks call it."""
        self.trainer.train_step(self.batch)


def layers_of(work: Workload, backend: Backend) -> list[Layer]:
    """Return the layers of a run's network on one rank, with shapes and without arrays."""
    graph = Graph(shapes_of(work.input_shape), backend=dry_backend(backend, 1), dtype=work.dtype)
    graph.add(work.create_net(), *graph.inputs)
    return [node.layer for node in graph.nodes if node.inputs]


def period(workload: Workload) -> int:
    """Return the number of steps after which communication repeats: that of local SGD, for example.

    >>> period(Workload("mlp", (4, 4, 1), scheme="local_sgd", scheme_options={"period": 4}))
    4
    """
    options = {**workload.scheme_options}
    options.pop("copies", None)  # of one rank there is one
    alone = replace(workload, scheme_options=options).create_exchange(Serial())
    return int(getattr(alone, "period", 1))
