"""The time of a training step, from its outline, costs of compute and a platform.

The events of the outline are followed on one rank: compute advances its clock, collectives of
layers and sums of gradients are rounds on its links (`pydtnn.perfmodel.overlap`), which make
progress between layers; a wait ends when the last round does. If the ranks of a host have fewer
cores than threads, compute takes longer by that ratio, as if all of them computed at all times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydtnn.model.summary import own_samples
from pydtnn.perfmodel.compute import ComputeCosts, Label
from pydtnn.perfmodel.compute.analytic import CLIPPING
from pydtnn.perfmodel.messages import MessageCosts
from pydtnn.perfmodel.outline import BucketOutline, Compute, Event, Outline, Start, Wait
from pydtnn.perfmodel.overlap import Channel, Operation
from pydtnn.perfmodel.platform import Platform

ACCESSES = {0: 3, 1: 5, 2: 7}
"""Numbers that an update reads and writes for each parameter, by slots of the optimizer."""

STEP = Label("phase", "step", 0)


@dataclass(frozen=True)
class LayerTime:
    """Time of a layer in a step.

    Attributes
    ----------
    name : str
    forward, backward, recomputed : float
        Compute, in s.
    exchange : float
        Waits for its collectives, in s.
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


@dataclass(frozen=True)
class StepTime:
    """The time of a step, in s.

    Attributes
    ----------
    forward, backward, recomputed : float
        Compute of layers.
    other : float
        Loss, and Python outside of layers.
    update : float
        Of the optimizer.
    layers_exposed : float
        Waits for collectives of layers.
    gradients_exposed : float
        Waits for sums of gradients after backward, and the processor's time for them.
    idle : float
        Waits of a pipeline's stage for others.
    busy : float
        Time for which the rank's link transfers.
    layers : tuple of LayerTime
    """

    forward: float
    backward: float
    recomputed: float
    other: float
    update: float
    layers_exposed: float
    gradients_exposed: float
    idle: float
    busy: float
    layers: tuple[LayerTime, ...]

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


class Tables:
    """Costs of the segments of an outline's passes, by numbers of samples.

    Parameters
    ----------
    outline : Outline
    costs : ComputeCosts
    """

    def __init__(self, outline: Outline, costs: ComputeCosts) -> None:
        self.outline = outline
        self._costs = costs
        self._known: dict[int, dict[int, float]] = {}

    def of(self, samples: int) -> Mapping[int, float]:
        """Return the seconds of each segment, by the identity of its event."""
        if samples not in self._known:
            self._known[samples] = {
                id(event): self._costs.seconds(
                    event.label, event.layer, own_samples(event.layer, samples)
                )
                for event in (*self.outline.forward, *self.outline.backward)
                if isinstance(event, Compute)
            }
        return self._known[samples]

    def step(self, samples: int) -> float:
        """Return the time of Python outside of layers, in s."""
        return self._costs.seconds(STEP, None, samples)


class _Clock:
    """One rank's main thread during a step."""

    def __init__(self, tables: Tables, messages: MessageCosts, samples: int) -> None:
        self.tables, self.seconds = tables, tables.of(samples)
        self.messages, self.samples = messages, samples
        self.slowdown = messages.slowdown
        self.now = 0.0
        self.channel = Channel()
        self.parts: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        self.gradient_work = 0.0

    def run(self, events: Sequence[Event], buckets: Sequence[BucketOutline] = ()) -> None:
        """Follow the events of a pass; the buckets are exchanged if they are given."""
        started: dict[int, tuple[Operation, str]] = {}
        for event in events:
            if isinstance(event, Compute):
                seconds = self.slowdown * self.seconds[id(event)]
                self.now += seconds
                node, kind = event.part
                self.parts[node][kind] += seconds
                before, self.now = self.now, self.channel.poll(self.now)
                self.gradient_work += self.now - before
            elif isinstance(event, Start):
                rounds = self.messages.layer(event, self.samples)
                started[event.number] = self.channel.start(rounds, self.now), event.node
            elif isinstance(event, Wait):
                operation, node = started.pop(event.number)
                before, self.now = self.now, self.channel.wait(operation, self.now)
                self.parts[node][3] += self.now - before
            elif buckets:
                self._ready(buckets[event.bucket])

    def _ready(self, bucket: BucketOutline) -> None:
        self.channel.start(self.messages.gradients(bucket), self.now)

    def finish(self) -> None:
        """Wait for all sums of gradients, and exchange those that the update exchanges."""
        before, self.now = self.now, self.channel.finish(self.now)
        for bucket in self.tables.outline.buckets:
            rounds = self.messages.update(bucket)
            self.now = self.channel.wait(self.channel.start(rounds, self.now), self.now)
        self.gradient_work += self.now - before

    def layers(self) -> tuple[LayerTime, ...]:
        """Return the times of layers in the order of execution."""
        return tuple(LayerTime(name, *parts) for name, parts in self.parts.items())


def update_seconds(
    outline: Outline, platform: Platform, slots: int, shards: int = 1, clips: bool = False
) -> float:
    """Return the time of the optimizer's update of this rank's parameters, in s."""
    numbers = ACCESSES.get(slots, 3 + 2 * slots) + (CLIPPING if clips else 0)
    moved = numbers * outline.memory.trained / shards
    return moved / platform.update_bandwidth


def step_time(
    tables: Tables, messages: MessageCosts, samples: int, *, slots: int = 1, clips: bool = False
) -> StepTime:
    """Return the time of a step without a pipeline.

    Parameters
    ----------
    tables : Tables
    messages : MessageCosts
    samples : int
        Of the rank.
    slots : int
        Slots of the optimizer.
    clips : bool
        Whether gradients are clipped.
    """
    outline, platform = tables.outline, messages.platform
    clock = _Clock(tables, messages, samples)
    clock.run(outline.forward)
    clock.run(outline.backward, outline.buckets)
    clock.finish()
    shards = messages.work.data if messages.work.scheme == "sharded" else 1
    layers = clock.layers()
    return StepTime(
        forward=sum(layer.forward for layer in layers),
        backward=sum(layer.backward for layer in layers),
        recomputed=sum(layer.recomputed for layer in layers),
        other=clock.slowdown * tables.step(samples),
        update=clock.slowdown * update_seconds(outline, platform, slots, shards, clips),
        layers_exposed=sum(layer.exchange for layer in layers),
        gradients_exposed=clock.gradient_work,
        idle=0.0,
        busy=clock.channel.busy,
        layers=layers,
    )


@dataclass(frozen=True)
class PassTime:
    """Times of one micro-batch in a stage of a pipeline, in s."""

    forward: float
    backward: float
    layers: tuple[LayerTime, ...]
    busy: float


def pass_time(tables: Tables, messages: MessageCosts, samples: int) -> PassTime:
    """Return the times of the passes of a micro-batch, without sums of gradients."""
    clock = _Clock(tables, messages, samples)
    clock.run(tables.outline.forward)
    forward = clock.now
    clock.run(tables.outline.backward)
    return PassTime(forward, clock.now - forward, clock.layers(), clock.channel.busy)


def gradients_exposed(tables: Tables, messages: MessageCosts, samples: int) -> float:
    """Return the time that sums of gradients add to the last micro-batch's backward, in s."""
    clock = _Clock(tables, messages, samples)
    clock.run(tables.outline.backward)
    alone = clock.now
    clock = _Clock(tables, messages, samples)
    clock.run(tables.outline.backward, tables.outline.buckets)
    clock.finish()
    return clock.now - alone
