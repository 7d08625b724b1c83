"""Predictions of a step: where its time and memory go, on every rank that was followed.

Closed formulas (`perfmodel.projection`) follow one rank, or one of each stage; virtual ranks
(`perfmodel.virtual.steps`) are followed one by one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from pydtnn.model.graph import shapes_of
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.training.workload import Workload
from pydtnn.utils.units import align, quantity

ITEM = 4
"""Bytes of a value of a sample in the loader, which prepares whole samples on every rank."""


@dataclass(frozen=True)
class LayerTime:
    """Time of a layer in a step.

    Attributes
    ----------
    name : str
        Those of convolutions include the layers that are fused into them.
    forward, backward, recomputed : float
        Compute, in s.
    exchange : float
        Waits in its passes for collectives, in s.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0
    exchange: float = 0.0

    @property
    def compute(self) -> float:
        """Forward and backward, in s."""
        return self.forward + self.backward + self.recomputed

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.exchange


def _over_layers(part: str, text: str) -> Any:
    """Return the property of a step that is the sum of a part of its layers."""
    found = cached_property(lambda step: float(sum(getattr(one, part) for one in step.layers)))
    found.__doc__ = text
    return found


@dataclass(frozen=True)
class StepTime:
    """The time of a step on a rank, in s.

    Attributes
    ----------
    layers : tuple of LayerTime
    other : float
        Loss, and Python outside of layers.
    update : float
        Of the optimizer.
    gradients_exposed : float
        Waits outside of layers, and the processor's time for these messages: sums of gradients;
        on virtual ranks those for other stages, too.
    idle : float
        Waits of a pipeline's stage for others.
    busy : float
        Time for which the rank's link transfers; 0 if it is not known.
    """

    layers: tuple[LayerTime, ...]
    other: float
    update: float
    gradients_exposed: float
    idle: float = 0.0
    busy: float = 0.0

    forward = _over_layers("forward", "Forward of all layers.")
    backward = _over_layers("backward", "Backward of all layers.")
    recomputed = _over_layers("recomputed", "Forward that backward repeats.")
    layers_exposed = _over_layers("exchange", "Waits for collectives of layers.")

    @property
    def compute(self) -> float:
        """Time in which the rank computes."""
        return self.forward + self.backward + self.recomputed + self.other + self.update

    @property
    def exposed(self) -> float:
        """Time in which it waits for messages."""
        return self.layers_exposed + self.gradients_exposed

    @property
    def seconds(self) -> float:
        """The step."""
        return self.compute + self.exposed + self.idle

    def parts(self, loader: float = 0.0) -> dict[str, float]:
        """Return the parts of a step by name, with the wait for the loader."""
        return {
            "compute": self.forward + self.backward + self.recomputed,
            "exchanges of layers": self.layers_exposed,
            "sums of gradients": self.gradients_exposed,
            "waits for stages": self.idle,
            "update": self.update,
            "Python": self.other,
            "loader": loader,
        }


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a rank at the peak of a step, in B.

    Attributes
    ----------
    parameters, gradients, slots : float
        The flat arrays; slots are those of the optimizer that this rank stores.
    activations : float
        All other arrays of the passes, with the batch, and gaps between arrays.
    scratch : float
        Of kernels.
    messages : float
        Buffers of the exchange of gradients: received chunks, residuals and other state of
        compression, averages, and those of the MPI library for pending sums.
    process : float
        Code and small objects of a training process, about.
    """

    parameters: float
    gradients: float
    slots: float
    activations: float
    scratch: float
    messages: float
    process: float

    @property
    def total(self) -> float:
        """Sum of all."""
        return float(sum(asdict(self).values()))

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        parts = asdict(self)
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True)
class RankPrediction:
    """Prediction for one rank."""

    step: StepTime
    memory: MemoryUse


@dataclass(frozen=True)
class Prediction:
    """Predicted training.

    Attributes
    ----------
    work : Workload
    platform : Platform
    ranks : tuple of RankPrediction
        Of all ranks, or by closed formulas one for all, with the step of the slowest stage and the
        memory of that with the most.
    state : float
        Bytes of a checkpoint.
    deciles : tuple of float
        First and last decile of the times of steps, relative to `seconds`; 1 if their compute was
        not measured.
    """

    work: Workload
    platform: Platform = field(repr=False)
    ranks: tuple[RankPrediction, ...]
    state: float
    deciles: tuple[float, float] = (1.0, 1.0)

    @cached_property
    def loader(self) -> float:
        """Time by which a step is longer because a rank waits for its batch, in s."""
        work, step = self.work, max(rank.step.seconds for rank in self.ranks)
        sample = ITEM * sum(map(prod, shapes_of(work.input_shape)))
        delay = self.platform.storage.delay
        return delay(work.samples_per_rank, sample, work.loader_threads, step)

    @cached_property
    def step(self) -> StepTime:
        """The step of the slowest rank; of equal ones, of that which computes longest."""
        steps = (rank.step for rank in self.ranks)
        return max(steps, key=lambda step: (round(step.seconds, 12), step.compute))

    @cached_property
    def memory(self) -> MemoryUse:
        """The memory of the rank with the most."""
        return max((rank.memory for rank in self.ranks), key=lambda memory: memory.total)

    @cached_property
    def seconds(self) -> float:
        """Time of a step, in s."""
        return self.step.seconds + self.loader

    @property
    def checkpoint(self) -> float:
        """Time of a checkpoint after each epoch, in s; 0 if the platform has no rate."""
        return self.platform.storage.checkpoint(self.state)

    @property
    def epoch(self) -> float:
        """Time of an epoch with a checkpoint, in s."""
        return self.work.steps * self.seconds + self.checkpoint

    @property
    def throughput(self) -> float:
        """Samples per second of all ranks."""
        return self.work.batch / self.seconds

    @property
    def bottleneck(self) -> str:
        """The part of a step that takes the most time, such as "compute (stage1.0.conv2 4 %)"."""
        step = self.step
        parts = step.parts(self.loader)
        name = max(parts, key=parts.__getitem__)
        part = {"compute": "compute", "exchanges of layers": "exchange"}.get(name)
        if part is None:
            return name
        layer = max(step.layers, key=lambda one: float(getattr(one, part)))
        share = 100 * getattr(layer, part) / self.seconds
        return f"{name.partition(' ')[0]} ({layer.name} {share:.0f} %)"

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values, times in s and memory in B."""
        return {
            "workload": self.work.name,
            "platform": self.platform.name,
            "batch": self.work.batch,
            "seconds": self.seconds,
            "throughput": self.throughput,
            "loader": self.loader,
            "checkpoint": self.checkpoint,
            "bottleneck": self.bottleneck,
            "ranks": [
                {
                    "step": rank.step.seconds,
                    **rank.step.parts(),
                    "memory": asdict(rank.memory) | {"total": rank.memory.total},
                    "layers": [asdict(layer) for layer in rank.step.layers],
                }
                for rank in self.ranks
            ],
        }

    def __str__(self) -> str:
        rows = [["rank", "step", "compute", "messages", "update", "other", "memory"]]
        for number, rank in enumerate(self.ranks):
            step, parts = rank.step, rank.step.parts()
            waits = step.exposed + step.idle
            times = (step.seconds, parts["compute"], waits, step.update, step.other)
            memory = quantity(rank.memory.total, 1024, "B")
            rows.append([str(number), *(f"{1e3 * time:.3f}" for time in times), memory])
        return "\n".join(
            [
                f"{self.work.name}, batch {self.work.batch}, on {self.platform.name}: "
                f"{1e3 * self.seconds:.3f} ms per step, {self.throughput:.1f} samples/s",
                *align(rows, left=1),
                "(times in ms; messages are waits that nothing overlaps)",
                *([f"loader: {1e3 * self.loader:.3f} ms per step"] if self.loader else []),
                f"bottleneck: {self.bottleneck}",
            ]
        )
