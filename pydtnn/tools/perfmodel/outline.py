"""The outline of a training step on one rank: what it computes, and what it exchanges when.

An outline has no arrays and no times. Quantities that depend on the samples of a pass are linear:
a part per pass and a part per sample. The time of a step follows from an outline, costs of compute
and a network (`pydtnn.tools.perfmodel.timing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pydtnn.layers.base import Layer
from pydtnn.model.halves import has_halves
from pydtnn.tools.perfmodel.compute import Label


class Affine(NamedTuple):
    """A quantity of a pass: a fixed part, and one per sample.

    >>> Affine.through(2, 10.0, 4, 14.0).at(10)
    26.0
    """

    fixed: float
    per_sample: float

    @classmethod
    def through(cls, few: int, value: float, many: int, other: float) -> Affine:
        """Return the line through the values for two numbers of samples."""
        slope = (other - value) / (many - few)
        return cls(value - few * slope, slope)

    def at(self, samples: float) -> float:
        """Return the value for a number of samples."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True)
class NodeWork:
    """A segment of the pass of a node.

    Attributes
    ----------
    label : Label
    layer : Layer
        With the shapes of this rank.
    """

    label: Label
    layer: Layer

    @cached_property
    def part(self) -> tuple[str, int]:
        """See `Label.part`."""
        return self.label.part

    @cached_property
    def later(self) -> float:
        """Part of it that the second half of backward computes."""
        return 0.5 if self.label.kind == "backward" and has_halves(self.layer) else 0.0


@dataclass(frozen=True)
class Start:
    """Start of a collective of a layer.

    Attributes
    ----------
    number : int
        Identifies the operation in its pass.
    node : str
    operation : {"allreduce", "messages", "neighbours"}
    axis : str
        Axis of the mesh.
    nbytes : Linear
        Length of the summed array, or of all messages that this rank sends, in B.
    largest : Linear
        Length of the longest message, in B.
    messages : int
        Messages that this rank sends.
    """

    number: int
    node: str
    operation: str
    axis: str
    nbytes: Affine
    largest: Affine
    messages: int


@dataclass(frozen=True)
class Finish:
    """Wait for the end of a collective."""

    number: int


@dataclass(frozen=True)
class BucketReady:
    """The gradients of a bucket are complete."""

    bucket: int


@dataclass(frozen=True)
class RepeatedBlock:
    """Events that occur again.

    Attributes
    ----------
    events : tuple of Event
        Those before it, in which no collective remains in progress.
    times : int
    shift : int
        Added to the numbers of the next buckets, to have those of the events.
    """

    events: tuple[Event, ...]
    times: int
    shift: int


Event = NodeWork | Start | Finish | BucketReady | RepeatedBlock


class Read(NamedTuple):
    """What the pass of a layer reads.

    Attributes
    ----------
    now, ahead : tuple of int
        Buckets of its parameters, and those of the next pass that reads others.
    """

    now: tuple[int, ...]
    ahead: tuple[int, ...]


@dataclass(frozen=True)
class BucketOutline:
    """Gradients that are exchanged and updated together.

    Attributes
    ----------
    nbytes : int
        In B, padding included.
    group : tuple of str
        Axes of the mesh over which the gradients are summed.
    matrices : tuple of (int, int)
        Rows and columns of the parameters with at least two axes, for low-rank compression.
    vectors : int
        Elements of all other parameters.
    itemsize : int
    """

    nbytes: int
    group: tuple[str, ...]
    matrices: tuple[tuple[int, int], ...]
    vectors: int
    itemsize: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.nbytes // self.itemsize


@dataclass(frozen=True)
class MemoryOutline:
    """Memory of a rank, in B.

    Attributes
    ----------
    values, gradients, copies : int
        Flat arrays of parameters.
    shared : int
        Those of gradients that share memory.
    trained : int
        Values that an optimizer updates; a slot has the same size.
    peak : Linear
        Maximum of all arrays of a pass besides the flat arrays and slots.
    nodes : tuple of Linear
        Arrays kept by each node between forward and backward, of a stage of a pipeline; without
        stages, one pass is in flight at a time, and there are none.
    scratch : int
        Scratch memory of kernels.
    """

    values: int
    gradients: int
    copies: int
    shared: int
    trained: int
    peak: Affine
    nodes: tuple[Affine, ...]
    scratch: int

    def kept(self, samples: float) -> float:
        """Return the memory of one pass between its forward and its backward."""
        return sum(max(node.at(samples), 0.0) for node in self.nodes)


class Period(NamedTuple):
    """What one of several equal blocks has in an outline.

    Attributes
    ----------
    forward, backward : slice
        Its events.
    kept : Affine
        Memory between its passes, in B.
    """

    forward: slice
    backward: slice
    kept: Affine


class StageBytes(NamedTuple):
    """Bytes of each value of a sample that a stage of a pipeline receives and sends in forward."""

    received: tuple[int, ...]
    sent: tuple[int, ...]


@dataclass(frozen=True)
class Outline:
    """One rank's part of a training step, without compute times.

    Attributes
    ----------
    forward, backward : tuple of Event
        The main thread's events in a pass, in order.
    buckets : tuple of BucketOutline
        In the order in which backward completes them.
    memory : MemoryOutline
    transfers : tuple of Transfer
        Messages of each stage of the rank; none without a pipeline.
    reads : mapping of (str, int) to Read
        By the name of a node with parameters, and 0 for forward or 1 for backward.
    parts : mapping of str to int
        The stage of each node among those of the rank.
    period : Period or None
        A block that can be repeated.
    added : tuple of BucketOutline
        Buckets of repeated events.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    buckets: tuple[BucketOutline, ...]
    memory: MemoryOutline
    transfers: tuple[StageBytes, ...]
    reads: Mapping[tuple[str, int], Read]
    parts: Mapping[str, int]
    period: Period | None = None
    added: tuple[BucketOutline, ...] = ()

    @cached_property
    def sizes(self) -> Counter[tuple[tuple[str, ...], int]]:
        """How many buckets have a group and a length in B, those of repeated events included."""
        return Counter((one.group, one.nbytes) for one in (*self.buckets, *self.added))

    def repeated(self, times: int) -> Outline:
        """Return the outline of a network with more blocks like that of `period`."""
        own, period = self.memory, self.period
        if period is None or not times:
            return self
        forward, backward = self.forward[period.forward], self.backward[period.backward]
        ready = [event.bucket for event in backward if isinstance(event, BucketReady)]
        added = times * tuple(self.buckets[number] for number in ready)
        nbytes = sum(bucket.nbytes for bucket in added)
        copies = nbytes * own.copies // own.values
        kept = Affine(*(times * each for each in period.kept))
        peak = Affine(*map(sum, zip(own.peak, kept, strict=True)))
        sizes = {name: getattr(own, name) + nbytes for name in ("values", "gradients", "trained")}
        nodes = (*own.nodes, kept)
        memory = replace(own, copies=own.copies + copies, peak=peak, nodes=nodes, **sizes)
        passes = []
        for all_of, place, events, shift in (
            (self.forward, period.forward, forward, len(ready)),
            (self.backward, period.backward, backward, -len(ready)),
        ):
            again = RepeatedBlock(events, times, shift)
            passes.append((*all_of[: place.stop], again, *all_of[place.stop :]))
        return replace(
            self, forward=passes[0], backward=passes[1], memory=memory, added=added, period=None
        )

    def of_part(self, events: Sequence[Event], part: int) -> list[Event]:
        """Return the events of a pass that belong to one of the stages of the rank."""
        if len(self.transfers) == 1:
            return [*events]
        found = []
        now = next((self.parts[e.part[0]] for e in events if isinstance(e, NodeWork)), 0)
        for event in events:
            now = self.parts[event.part[0]] if isinstance(event, NodeWork) else now
            if now == part:
                found.append(event)
        return found
