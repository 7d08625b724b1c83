"""The description of a run, and a rank of it that executes steps without data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from math import ceil, prod
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, Serial
from pydtnn.comm.schedules.rule import RULE
from pydtnn.kernels import Backend, create_backend
from pydtnn.layers import Block, Layer, Net
from pydtnn.layers.collectives import PIPELINE
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import Optimizer, get_optimizer
from pydtnn.optimizers.loss_scale import LossScale
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.mesh import Mesh
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import SCHEME
from pydtnn.parallel.sums import Sums
from pydtnn.training.batch_checks import DEFAULT_PER_RANK
from pydtnn.training.capabilities import FEATURES
from pydtnn.training.checks import check_options
from pydtnn.training.setup import Setup
from pydtnn.utils.validate import check_int

WHO = "Workload"

SHARDED = ("sharded", "sharded_gradients", "sharded_parameters")
"""Schemes whose ranks divide the state of the optimizer (ZeRO stages 1 to 3)."""


@dataclass(frozen=True)
class Workload:
    """The description of a run: what is trained, and how ranks share it.

    The command line creates one from its options, and trainers, virtual ranks and predictions are
    created from it; a search or an oracle varies it with `dataclasses.replace`. It has no field for
    what does not matter to a step: loss, learning rate, augmentation, and what happens between
    steps.

    Parameters
    ----------
    model : str, callable or Net
        Name of a model, a function of classes and input shape that returns a net, or a net that is
        not part of a model.
    input_shape : tuple of int
        Of one sample.
    classes : int
    batch : int
        Samples of all ranks per step.
    axes : mapping of str to int
        Ranks along each axis of the mesh, in its order; one rank if empty.
    plan : Plan, mapping or str, optional
        How the network is cut along the axes besides "data"; by default as their names say.
    model_options : mapping
        Further arguments of the model's function.
    samples : int
        Of an epoch.
    seed : int
        Of the initial weights.
    dtype : str
    formats : Formats or str, optional
        See `Model`.
    fusion : bool
        Whether batch norm, additions and ReLU are fused into convolutions.
    bucket_bytes : int, optional
        Size of the messages with gradients, in B; by default that of `Model`.
    recompute : int, str, sequence of str or None
        See `Model`; for closed formulas, "auto" is about the square root of the possible parts.
    memory_limit : int, optional
        With "auto": recompute as little as possible within this memory of a rank, in B.
    freeze : sequence of str
        Layers whose parameters are not trained.
    scheme, compress, allreduce : str or callable
        Parallel scheme, compression of gradients and algorithm of sums, as on the command line.
    scheme_options, compress_options : mapping
    overlap : bool
        Whether gradients are exchanged while backward runs.
    exact : bool
        Whether results do not depend on the numbers of ranks and threads.
    shards : int
        Of a batch, if exact.
    optimizer : str or callable
    optimizer_options : mapping
    ema : float, optional
        Decay of an average of the parameters.
    accumulation : int
        Micro-batches of each rank per step, without a pipeline.
    micro_batches : int, optional
        Of each rank in a pipeline; by default four per rank of it, or as many as there are samples.
    pipeline_schedule : str or callable
    sync_batch_norm : bool
        Whether batch norm normalises over the batch of all ranks.
    loader_threads : int
        Threads of a rank that prepare batches while a step runs; with 0, steps wait for each batch.
    threads : int, optional
        Of each rank; by default those of the platform in closed formulas, and otherwise 1.
    device : str
    tuning : str, optional
        How algorithms of convolutions are chosen.
    """

    model: str | Callable[..., Net] | Net
    input_shape: tuple[int, ...]
    classes: int = 10
    batch: int = 64
    axes: Mapping[str, int] = field(default_factory=dict)
    plan: Any = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 1_280_000
    seed: int = 0
    dtype: str = "float32"
    formats: Any = None
    fusion: bool = True
    bucket_bytes: int | None = None
    recompute: Any = None
    memory_limit: int | None = None
    freeze: Sequence[str] = ()
    scheme: str | Callable[..., Any] = "allreduce"
    scheme_options: Mapping[str, Any] = field(default_factory=dict)
    compress: str | Callable[..., Any] | None = None
    compress_options: Mapping[str, Any] = field(default_factory=dict)
    allreduce: str | Callable[..., Any] = RULE
    overlap: bool = True
    exact: bool = False
    shards: int = 8
    optimizer: str | Callable[..., Optimizer] = "sgd"
    optimizer_options: Mapping[str, Any] = field(
        default_factory=lambda: {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    )
    ema: float | None = None
    accumulation: int = 1
    micro_batches: int | None = None
    pipeline_schedule: str | Callable[..., Any] = "1f1b"
    sync_batch_norm: bool = False
    loader_threads: int = 1
    threads: int | None = None
    device: str = "cpu"
    tuning: str | None = None

    def __post_init__(self) -> None:
        check_int(WHO, "batch", self.batch, at_least=1)

    # -- the ranks --------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return prod(self.axes.values())

    @property
    def data(self) -> int:
        """Ranks along the axis "data"."""
        return self.axes.get("data", 1)

    @property
    def parts(self) -> int:
        """Ranks over which a scheme of `SHARDED` divides the state; 1 with other schemes."""
        return self.data // self.copies if self.scheme in SHARDED else 1

    @property
    def copies(self) -> int:
        """Copies of the state, in which a scheme divides it."""
        return int(self.scheme_options.get("copies", 1))

    @property
    def cut(self) -> dict[str, int]:
        """Axes with several ranks along which the network is cut."""
        return {axis: n for axis, n in self.axes.items() if axis != "data" and n > 1}

    @property
    def stages(self) -> int:
        """Stages of a pipeline."""
        return self.axes.get(PIPELINE, 1)

    @property
    def parallel(self) -> str:
        """The axes as the argument of `--parallel`."""
        return ",".join(f"{axis}={n}" for axis, n in self.axes.items() if n > 1)

    def stride(self, axis: str) -> int:
        """Return the distance of neighbours along an axis."""
        names = list(self.axes)
        return prod(self.axes[name] for name in names[names.index(axis) + 1 :])

    @property
    def samples_per_rank(self) -> int:
        """Samples of a step on the rank that has the most.

        Raises
        ------
        ValueError
            If there are fewer samples than ranks along "data".
        """
        if self.data > self.batch:
            raise ValueError(
                f"{self.strategy}: expected at least one sample for each of {self.data} ranks "
                f"along data, got a global batch of {self.batch}; use fewer ranks or a larger batch"
            )
        return ceil(self.batch / self.data)

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return ceil(self.samples / self.batch)

    def in_micro_batches(self) -> Workload:
        """Return the run with the usual number of micro-batches, if it is a pipeline without one.

        >>> Workload("mlp", (4,), batch=64, axes={"pipeline": 2}).in_micro_batches().micro_batches
        8
        """
        if self.stages == 1 or self.micro_batches is not None:
            return self
        most = self.batch // self.data
        return replace(self, micro_batches=min(DEFAULT_PER_RANK * self.stages, most))

    def along(self, axes: Mapping[str, int], **others: Any) -> Workload:
        """Return the run on other ranks; micro-batches are those of pipelines.

        >>> Workload("mlp", (4,), axes={"pipeline": 2}, micro_batches=4).along({"data": 2}).strategy
        'data 2'
        """
        kept = self.micro_batches if axes.get(PIPELINE, 1) > 1 else None
        return replace(self, axes=axes, micro_batches=kept, **others)

    # -- words ------------------------------------------------------------------------------------

    @property
    def strategy(self) -> str:
        """How training is distributed, in words.

        >>> Workload("mlp", (4,), axes={"data": 4, "spatial": 2}, recompute="auto").strategy
        'data 4 x spatial 2, recompute'
        """
        axes = " x ".join(f"{axis} {n}" for axis, n in self.axes.items() if n > 1) or "serial"
        words = [axes]
        if self.recompute is not None:
            words.append("recompute" if self.recompute == "auto" else f"recompute {self.recompute}")
        if self.stages > 1 and self.pipeline_schedule != "1f1b":
            words.append(_name_of(self.pipeline_schedule))
        if self.scheme != "allreduce":
            several = f" in {self.copies} copies" if self.copies > 1 else ""
            words.append(_name_of(self.scheme) + several)
        if self.compress:
            words.append(_name_of(self.compress))
        return ", ".join(words)

    @property
    def kind(self) -> str:
        """The strategy without numbers of ranks: "data x spatial"."""
        kinds = [axis for axis, n in self.axes.items() if n > 1]
        rest = self.strategy.partition(",")[2]
        return " x ".join(kinds or ["serial"]) + ("," + rest if rest else "")

    @property
    def network(self) -> str:
        """Name of the model."""
        return "network" if isinstance(self.model, Layer | Block) else _name_of(self.model)

    @property
    def name(self) -> str:
        """Network and strategy in words: "resnet20, data 2 x filter 2"."""
        return f"{self.network}, {self.strategy}"

    # -- what is built from it --------------------------------------------------------------------

    def create_net(self) -> Net:
        """Create the network, or a copy of the given one."""
        net = create_net(self.model, self.classes, self.input_shape, **self.model_options)
        if net is self.model:
            net = copy.deepcopy(net)
        return net

    def create_backend(self, **options: Any) -> Backend:
        """Create the backend; see `pydtnn.kernels.create_backend` for further options."""
        own = {"threads": self.threads or 1, "tuning": self.tuning}
        return create_backend(self.device, **own | options)

    def create_model(self, net: Net, backend: Backend, mesh: Mesh | None) -> Model:
        """Create this rank's part of the model."""
        names = ("dtype", "formats", "seed", "bucket_bytes", "plan", "pipeline_schedule")
        same = {name: getattr(self, name) for name in (*names, "recompute", "memory_limit")}
        return Model(net, self.input_shape, backend=backend, mesh=mesh, fuse=self.fusion, **same)

    def create_exchange(self, comm: Communicator) -> GradientExchange:
        """Create the scheme by which ranks exchange gradients."""
        sums: Any = Sums
        if self.exact:
            if self.compress is not None:
                raise ValueError(f"{WHO}: {FEATURES['exact training'].excludes['compression']}")
            sums = partial(ExactSums, shards=self.shards)
        elif self.compress is not None:
            sums = create_sums(self.compress, **self.compress_options)
        scheme = SCHEME.find(self.scheme)
        return scheme.make(self.scheme_options, comm, overlap=self.overlap, sums=sums)

    def check(self, model: Model) -> None:
        """Raise ValueError if a trainer would refuse the run, as features cannot be combined.

        Parameters
        ----------
        model : Model
            A rank's part of the network; its backend need not compute.
        """
        ranks = Serial()
        ranks.size = self.data
        optimizer, exchange = self.create_optimizer(), self.create_exchange(ranks)
        scale = LossScale(model.backend) if model.dtype == np.float16 else None
        objective: Any = None  # is not part of what is refused
        mesh: Any = model.mesh
        check_options(
            Setup(model, optimizer, exchange, objective, scale, mesh=mesh, **self.trainer_options())
        )

    def create_optimizer(self) -> Optimizer:
        """Create the optimizer, with its constant or default learning rate."""
        return get_optimizer(self.optimizer, **self.optimizer_options)

    @cached_property
    def slots(self) -> int:
        """Values that the optimizer stores for each parameter: 1 for momentum, 2 for Adam."""
        return self.create_optimizer().state_size

    @property
    def uses_up(self) -> bool:
        """Whether gradients share memory: those of a rank alone, as in `Trainer`."""
        alone = self.ranks == self.accumulation == 1 and self.scheme == "allreduce"
        whole = self.create_optimizer().needs_all_gradients or self.dtype == "float16"
        return alone and not (whole or self.exact or self.compress)

    @cached_property
    def clipping(self) -> int:
        """Numbers that clipping reads and writes for each parameter."""
        return clipping_of(self.create_optimizer())

    def trainer_options(self) -> dict[str, Any]:
        """Return the arguments of `Trainer` about the passes of a step."""
        names = ("accumulation", "micro_batches", "sync_batch_norm")
        return {name: getattr(self, name) for name in names}


def clipping_of(optimizer: Optimizer) -> int:
    """Return how many numbers clipping reads and writes for each parameter, on a CPU.

    The norm reads the gradients, which are then scaled: by rules with `scales` in the update.
    """
    return 0 if optimizer.clip_norm is None else 1 if optimizer.scales else 3


def names_of_fields() -> tuple[str, ...]:
    """Return the names of all fields of a `Workload`."""
    return tuple(one.name for one in fields(Workload))


def _name_of(part: Any) -> str:
    return str(getattr(part, "__name__", part))
