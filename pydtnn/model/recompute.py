"""Recomputation: values that are dropped in forward and computed again in backward.

The order of execution is cut into segments. Forward keeps only what enters a segment, and small
arrays of layers that compute statistics (`Repeatable`); backward runs the segment's forward pass
again when it arrives there. After the last segment everything is kept, since backward begins there.

References
----------
Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from pydtnn.kernels import Deferred
from pydtnn.layers.base import Saved, StepContext
from pydtnn.layers.node import Node
from pydtnn.layers.recomputed import Value
from pydtnn.layers.repeatable import Repeatable

Run = Callable[[Node, dict[int, Value], StepContext, int, Any], Generator[Any, Any, Any]]
"""Generator that runs one node: see `_forward_node` in `pydtnn.model.execution`."""


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes whose values are dropped and recomputed together.

    Attributes
    ----------
    nodes : tuple of Node
        The nodes that run again.
    start, stop : int
        Indices of the first node, and of the node after the last.
    inputs : tuple of int
        Nodes before the segment whose outputs it reads.
    outputs : frozenset of int
        Its nodes whose outputs nodes after the segment read.
    releases : dict of int to tuple of int
        For each node, the values that no later node of the segment reads.
    """

    nodes: tuple[Node, ...]
    start: int
    stop: int
    inputs: tuple[int, ...]
    outputs: frozenset[int]
    releases: dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Segments:
    """The segments of a graph.

    Parameters
    ----------
    parts : tuple of Segment

    Attributes
    ----------
    checkpoints : frozenset of int
        Nodes whose outputs are kept because a later segment, or the part after the last one, reads
        them.
    """

    parts: tuple[Segment, ...] = ()
    checkpoints: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        outputs = (part.outputs for part in self.parts)
        object.__setattr__(self, "checkpoints", frozenset().union(*outputs))

    def of(self, index: int) -> Segment | None:
        """Return the segment of a node, if its values are dropped."""
        return next((part for part in self.parts if part.start <= index < part.stop), None)


KEPT_ALL = Segments()
"""Without recomputation."""


def cut(nodes: Sequence[Node], trained: Collection[int], bounds: Sequence[int]) -> Segments:
    """Cut a graph at `bounds`: a segment ends before each of them but the first.

    Parameters
    ----------
    nodes : sequence of Node
        All nodes of the graph.
    trained : collection of int
        Nodes that run backward.
    bounds : sequence of int
        Increasing indices of nodes; the first segment begins at the first, and everything is kept
        before it and from the last on.
    """
    return Segments(tuple(_segment(nodes, trained, *pair) for pair in pairwise(bounds)))


def _segment(nodes: Sequence[Node], trained: Collection[int], start: int, stop: int) -> Segment:
    needed: set[int] = set()  # nodes that run again, and outputs that they read
    last: dict[int, int] = {}
    for node in reversed(nodes[start:stop]):
        if node.index in trained or node.index in needed:
            last.setdefault(node.index, node.index)
            needed.add(node.index)
            for source in node.inputs:
                last.setdefault(source.index, node.index)
                needed.add(source.index)
    own = tuple(node for node in nodes[start:stop] if node.index in needed)
    return Segment(
        own,
        start,
        stop,
        inputs=tuple(sorted(i for i in needed if i < start)),
        outputs=frozenset(
            node.index
            for node in nodes[start:stop]
            if any(reader.index >= stop for reader in node.consumers)
        ),
        releases={node.index: tuple(i for i, n in last.items() if n == node.index) for node in own},
    )


class Recorder:
    """Stores what backward requires of each node of one forward pass.

    Parameters
    ----------
    trained : collection of int
        Nodes that run backward.
    segments : Segments
    values : list
        The outputs of all nodes, as far as they are needed, during the pass.
    context : StepContext
    samples : int

    Attributes
    ----------
    residuals : list
        For each node, its saved values, or the `Dropped` that computes them again.
    """

    def __init__(
        self,
        trained: Collection[int],
        segments: Segments,
        values: list[Value],
        context: StepContext,
        samples: int,
    ) -> None:
        self.residuals: list[Saved] = [None] * len(values)
        self._trained, self._segments, self._values = trained, segments, values
        self._context, self._samples = context, samples
        self._dropped: Dropped | None = None

    def save(self, node: Node, saved: Saved) -> None:
        """Store the saved values of a node that has just run, or drop them."""
        index, values = node.index, self._values
        if not self._segments.parts:
            if index in self._trained:
                self.residuals[index] = saved
            return
        dropped = self._dropped
        if dropped is None or index >= dropped.segment.stop:
            segment = self._segments.of(index)
            dropped = None
            if segment is not None:
                inputs = {i: values[i] for i in segment.inputs}
                dropped = Dropped(segment, inputs, self._context, self._samples)
            self._dropped = dropped
        if dropped is not None:
            dropped.add(node, saved, values[index])
        if index in self._trained:
            self.residuals[index] = saved if dropped is None else dropped
        for source in node.inputs:
            value = values[source.index]
            if source.index in self._segments.checkpoints and isinstance(value, Deferred):
                value.forget_terms()


class Dropped:
    """A segment of one pass whose values were dropped.

    Parameters
    ----------
    segment : Segment
    values : dict of int to Array or Deferred
        The values that enter it.
    context : StepContext
    samples : int

    Attributes
    ----------
    outputs : dict of int to weakref
        Deferred outputs that nodes after the segment read. Their terms are values of the segment.
    """

    def __init__(
        self, segment: Segment, values: dict[int, Value], context: StepContext, samples: int
    ) -> None:
        self.segment = segment
        self.outputs: dict[int, weakref.ref[Deferred]] = {}
        self._values = values
        self._context, self._samples = replace(context, recomputing=True), samples
        self._kept: dict[int, Any] = {}

    def add(self, node: Node, saved: Saved, y: Value) -> None:
        """Keep the small values of a node that `forward_again` requires."""
        if isinstance(node.layer, Repeatable) and node.layer.repeats:
            self._kept[node.index] = node.layer.kept(saved)
        if node.index in self.segment.outputs and isinstance(y, Deferred):
            self.outputs[node.index] = weakref.ref(y)

    def restore(self, residuals: list[Saved], run: Run) -> Generator[Any, Any, None]:
        """Run the segment again and store the saved values of its nodes."""
        values, self._values = self._values, {}
        for node in self.segment.nodes:
            index = node.index
            kept = self._kept.pop(index, None)
            y, saved = yield from run(node, values, self._context, self._samples, kept)
            before = self.outputs[index]() if index in self.outputs else None
            if before is not None and isinstance(y, Deferred):
                before.take_terms(y)
            values[index] = y
            if residuals[index] is self:
                residuals[index] = saved
            del y, saved, kept, before
            for i in self.segment.releases[index]:
                values.pop(i, None)


def has_dropped(residuals: Sequence[Saved]) -> bool:
    """Return whether values of a pass were dropped, so that `restore` is needed."""
    return any(isinstance(saved, Dropped) for saved in residuals)


def restore(node: Node, residuals: list[Saved], run: Run) -> Generator[Any, Any, None]:
    """Compute the values that a node's backward requires, if they were dropped.

    A layer that finishes the gradient of a deferred input requires the terms of that input, which
    are values of the segment that has computed it.
    """
    own = residuals[node.index]
    if isinstance(own, Dropped):
        yield from own.restore(residuals, run)
    if node.layer.finishes:
        source = node.inputs[0].index
        before = residuals[source]
        if isinstance(before, Dropped) and source in before.outputs:
            yield from before.restore(residuals, run)
