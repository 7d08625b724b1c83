"""A training run whose time is predicted or measured: network, batch and how ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, Serial
from pydtnn.comm.schedules.rule import RULE, create_allreduce
from pydtnn.data import Batch
from pydtnn.data.order import own_shards
from pydtnn.kernels import Backend, create_backend
from pydtnn.layers import Net
from pydtnn.model import Model
from pydtnn.model.model import example_input
from pydtnn.models import create_net
from pydtnn.optimizers import get_optimizer
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.pipeline import actions_of
from pydtnn.parallel.pipeline.check import most_in_flight
from pydtnn.parallel.schemes import create_scheme
from pydtnn.training.trainer import Trainer
from pydtnn.utils.observer import Observer
from pydtnn.utils.validate import check_int

WHO = "Workload"


@dataclass(frozen=True)
class Workload:
    """A network and how its training is distributed.

    Parameters
    ----------
    model : str or callable
        Name of a model, or a function of classes and input shape that returns a net.
    input_shape : tuple of int
        Of one sample.
    classes : int
    batch : int
        Samples of all ranks per step.
    axes : mapping of str to int
        Ranks along each axis of the mesh; one rank if empty.
    plan : Plan, mapping or str, optional
        How the network is cut along the axes besides "data"; see `Plan`.
    model_options, options : mapping
        Arguments of the model's function, and of `Model`: `recompute`, `fuse`, `dtype`, ...
    scheme, compress, allreduce : str or callable
        Parallel scheme, compression of gradients and algorithm of sums, as on the command line.
    scheme_options, compress_options : mapping
    optimizer : str
    optimizer_options : mapping
    trainer_options : mapping
        Further arguments of `Trainer`, such as `micro_batches` and `accumulation`.
    threads : int
        Of each rank.

    Raises
    ------
    ValueError
        If there are fewer samples than ranks along "data".
    """

    model: str | Callable[..., Net]
    input_shape: tuple[int, ...]
    classes: int = 10
    batch: int = 64
    axes: Mapping[str, int] = field(default_factory=dict)
    plan: Any = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    scheme: str | Callable[..., Any] = "allreduce"
    scheme_options: Mapping[str, Any] = field(default_factory=dict)
    compress: str | Callable[..., Any] | None = None
    compress_options: Mapping[str, Any] = field(default_factory=dict)
    allreduce: str | Callable[..., Any] = RULE
    optimizer: str = "sgd"
    optimizer_options: Mapping[str, Any] = field(
        default_factory=lambda: {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    )
    trainer_options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1

    def __post_init__(self) -> None:
        check_int(WHO, "batch", self.batch, at_least=1)
        data = self.axes.get("data", 1)
        if self.batch < data:
            raise ValueError(
                f"{WHO}: batch must be at least the {data} ranks along data, got {self.batch}; use "
                "fewer ranks or more samples"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.axes.values())

    @property
    def name(self) -> str:
        """Network and plan in words: "resnet20, data 2 x filter 2"."""
        net = self.model if isinstance(self.model, str) else self.model.__name__
        words = [" x ".join(f"{axis} {n}" for axis, n in self.axes.items()) or "1 rank"]
        if self.scheme != "allreduce":
            words.append(str(getattr(self.scheme, "__name__", self.scheme)))
        if self.compress:
            words.append(str(getattr(self.compress, "__name__", self.compress)))
        words += [f"{name} {value}" for name, value in self.options.items()]
        return ", ".join([net, *words])

    def key(self) -> dict[str, Any]:
        """Return all that determines the time of compute besides the machine, as JSON values."""
        function = None if isinstance(self.model, str) else self.model
        net = self.model if function is None else f"{function.__module__}:{function.__qualname__}"
        return {
            "model": net,
            "input_shape": list(self.input_shape),
            "classes": self.classes,
            "batch": self.batch,
            "axes": dict(self.axes),
            "threads": self.threads,
            **{
                name: repr(getattr(self, name))
                for name in (
                    *("plan", "model_options", "options", "scheme", "scheme_options", "compress"),
                    *("compress_options", "optimizer", "optimizer_options", "trainer_options"),
                )
            },
        }


class Rank:
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
        comm = create_allreduce(workload.allreduce, comm)
        mesh = Mesh(comm, **workload.axes) if workload.axes else None
        data = comm if mesh is None else mesh.data
        net = create_net(
            workload.model, workload.classes, workload.input_shape, **workload.model_options
        )
        model = Model(
            net,
            workload.input_shape,
            backend=backend or create_backend("cpu", threads=workload.threads),
            plan=workload.plan,
            mesh=mesh,
            **workload.options,
        )
        compression = {}
        if workload.compress:
            compression["sums"] = create_sums(workload.compress, **workload.compress_options)
        self.trainer = Trainer(
            model,
            get_optimizer(workload.optimizer, **workload.optimizer_options),
            metrics=(),
            exchange=create_scheme(workload.scheme, data, **workload.scheme_options, **compression),
            progress=False,
            observers=observers,
            check_equal=0,
            **_auxiliary(len(model.output_shapes)) | dict(workload.trainer_options),
        )
        self.trainer.exchange.start(model.buckets)
        self.batch = self._create_batch(workload, data)
        self._choose_segments()

    def _create_batch(self, workload: Workload, data: Communicator) -> Batch:
        """Create this rank's part of the batch, and of its samples."""
        parts = self.trainer.accumulation
        rows, shards = own_shards(workload.batch, data.size * parts, data.rank, data.size)
        self.largest = -(-workload.batch // (data.size * parts))
        samples = np.arange(workload.batch)[rows]
        rng = np.random.default_rng(data.rank)
        model = self.trainer.model
        node = model.graph.inputs[0]
        shape = workload.input_shape if node.part is None else node.shape
        x = example_input(node, shape, len(samples), rng)
        positions = model.output_shape[:-1] if model.stage is None else ()  # of sequences
        y = rng.integers(workload.classes, size=(len(samples), *positions))
        return Batch(
            x.astype(model.dtype), y, samples, 0, workload.batch, shards if parts > 1 else ()
        )

    def _choose_segments(self) -> None:
        """Choose what is recomputed for this batch size, as `Trainer.fit` does."""
        trainer = self.trainer
        if trainer.model.recompute is not None:
            slots = len(trainer.optimizer.slots)
            trainer.model.choose_segments(self.largest, slots=slots, in_flight=self.in_flight)

    @property
    def in_flight(self) -> int:
        """Micro-batches whose saved values exist at a time."""
        stage, shards = self.trainer.model.stage, max(len(self.batch.shards), 1)
        if stage is None:
            return 1
        schedule = self.trainer.setup.schedule
        return most_in_flight(actions_of(schedule, stage.number, stage.count, shards))

    def step(self) -> None:
        """Run a training step. Collective: all ranks call it."""
        self.trainer.train_step(self.batch)


def _auxiliary(outputs: int) -> dict[str, Any]:
    """Return the arguments of `Trainer` for a model of several outputs, if none are given."""
    return {"auxiliary_weights": [1.0] * (outputs - 1)} if outputs > 1 else {}


def period(workload: Workload) -> int:
    """Return the number of steps after which communication repeats: that of local SGD, for example.

    >>> period(Workload("mlp", (4, 4, 1), scheme="local_sgd", scheme_options={"period": 4}))
    4
    """
    scheme = create_scheme(workload.scheme, Serial(), **workload.scheme_options)
    return int(getattr(scheme, "period", 1))
