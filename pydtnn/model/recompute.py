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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from pydtnn.kernels import Deferred
from pydtnn.layers.base import Finisher, Saved
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.node import Node
from pydtnn.layers.recomputed import Recomputed, Value
from pydtnn.layers.repeatable import Repeatable
from pydtnn.model.execution import ForwardPass, checked, forward_node
from pydtnn.model.passes import Hook, Pass, Run, compose
from pydtnn.utils.names import matches, prefixes, select

# Where the order of execution is cut into segments that backward recomputes.
#
# A cut is the index of a node: its segment ends before it. In forward, values that cross a cut are
# kept, and those inside a segment are dropped. With ``kept(a, j)`` the bytes that the nodes from a
# to j save for backward, ``size(j)`` those of the output of j, and ``cross(a, b)`` those of the
# outputs of nodes from a on that cross b, the memory while backward runs the segment from a to b is
# about ::
#
#     held(a) + max over j of kept(a, j) + g size(j),    held(b) = held(a) + cross(a, b)
#
# with g gradients of this size at a time, 1 to 3, which depends on the network. The same holds for
# the part after the last cut, which is not dropped. Everything before the last cut runs again. The
# best segments for a bound of this memory are found by dynamic programming, for several bounds and
# g; those that are used are chosen by the exact forecast.

MEMORY_BOUNDS = 16
"""Bounds of the memory for which segments are computed to find the best."""

GRADIENTS = (1, 2, 3)
"""Gradients of the size of a layer's output that may exist during its backward."""


class Cuts:
    """The possible cuts of a graph, and the memory between them.

    Parameters
    ----------
    nodes : sequence of Node
    trained : collection of int
        Indices of the nodes that run backward.
    kept : sequence of int
        Bytes that each node saves for backward if nothing is dropped.
    sizes : sequence of int
        Bytes of each node's output.

    Attributes
    ----------
    first : int
        The first node that runs backward, where the first segment begins.
    places : ndarray of int
        `first`, then all possible cuts.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        trained: Collection[int],
        kept: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self.first = beginning(nodes, trained)
        self.places = np.array(
            [self.first, *(i for i in range(self.first + 1, len(nodes)) if divides(nodes, i))]
        )
        self._ends = np.array(
            [max((reader.index for reader in node.consumers), default=-1) for node in nodes]
        )
        self._sizes = np.array(sizes)
        self._sums = np.concatenate([[0], np.cumsum(kept)])

    def backward(self, stop: int, gradients: int) -> np.ndarray:
        """Return the memory of backward from each cut of `places` to `stop`; 0 after `stop`."""
        peaks = self._sums[1 : stop + 1] + gradients * self._sizes[:stop]
        peaks = np.maximum.accumulate(peaks[::-1])[::-1]
        inside = self.places[self.places < stop]
        found = np.zeros(len(self.places), peaks.dtype)
        found[: len(inside)] = peaks[inside] - self._sums[inside]
        return found

    def crossing(self, place: int) -> np.ndarray:
        """Return, for each cut ``a`` of `places`, ``cross(a, place)``; 0 after `place`."""
        crosses = (self._ends >= place) & (np.arange(len(self._ends)) < place)
        after = np.cumsum(np.where(crosses, self._sizes, 0)[::-1])[::-1]
        return after[self.places]

    def even(self, parts: int) -> tuple[int, ...]:
        """Return cuts into parts that save about equally many bytes, where few bytes cross."""
        found = [self.first]
        for part in range(1, parts):
            free = self.places[(self.places > found[-1])][: -(parts - part - 1) or None]
            wanted = self._sums[-1] * part / parts
            crossing = np.array([self.crossing(place)[0] for place in free])
            found.append(int(free[np.argmin(np.abs(self._sums[free] - wanted) + crossing)]))
        return tuple(found)

    def below(self, limit: float, gradients: int) -> tuple[int, ...] | None:
        """Return the cuts with the shortest recomputed part whose memory is at most `limit`.

        Parameters
        ----------
        limit : float
            Bytes.
        gradients : int
            See `GRADIENTS`.

        Returns
        -------
        tuple of int or None
            `first` and the cuts, empty without recomputation; None if there are none.
        """
        places = self.places
        held = np.full(len(places), np.inf)
        held[0] = 0
        last = self.backward(len(self._sizes), gradients)
        before = np.zeros(len(places), int)
        for b, place in enumerate(places):
            if b:
                need = held[:b] + self.crossing(place)[:b]
                need[held[:b] + self.backward(place, gradients)[:b] > limit] = np.inf
                before[b] = int(np.argmin(need))
                held[b] = need[before[b]]
            if held[b] + last[b] <= limit:
                found = [b]
                while found[-1]:
                    found.append(int(before[found[-1]]))
                return tuple(int(places[i]) for i in reversed(found)) if b else ()
        return None

    def trials(self) -> list[tuple[int, ...]]:
        """Return cuts for decreasing bounds of the memory, down to the lowest that is possible."""
        found: list[tuple[int, ...] | None] = []
        for gradients in GRADIENTS:
            whole = float(self.backward(len(self._sizes), gradients)[0])
            low, high = 0.0, whole
            for _ in range(MEMORY_BOUNDS):
                middle = (low + high) / 2
                possible = self.below(middle, gradients) is not None
                low, high = (low, middle) if possible else (middle, high)
            bounds = np.linspace(whole, high, MEMORY_BOUNDS)
            found += [self.below(bound, gradients) for bound in bounds]
        return list(dict.fromkeys(cuts for cuts in found if cuts is not None))


def beginning(nodes: Sequence[Node], trained: Collection[int]) -> int:
    """Return the first layer that runs backward; the number of nodes if there is none."""
    found = (node.index for node in nodes if node.inputs and node.index in trained)
    return next(found, len(nodes))


def divides(nodes: Sequence[Node], place: int) -> bool:
    """Return whether a cut before a node is useful.

    It is not after a layer whose output is not stored, because its only reader computes it: keeping
    its inputs costs the same, and the cut before this layer saves their recomputation.
    """
    layer = nodes[place - 1].layer
    return not isinstance(layer, NormAddReLU) or layer.keeps


def named_cuts(
    nodes: Sequence[Node],
    trained: Collection[int],
    patterns: Sequence[str],
    known: Sequence[str],
) -> tuple[int, ...]:
    """Return cuts after the layers and blocks of these names.

    Parameters
    ----------
    nodes, trained
        See `Cuts`.
    patterns : sequence of str
        Names of layers or blocks, such as "stage1.0", or with wildcards: "stage?.?".
    known : sequence of str
        Names of all layers of the model, of which a stage of a pipeline has a part.

    Raises
    ------
    ValueError
        If a pattern matches no layer, or no layer with another one after it.
    """
    names = {name: node.index for node in nodes if node.inputs for name in names_of(node)}
    select("Model.recompute", patterns, known)
    ends: dict[str, int] = {}
    for name, index in names.items():
        # the outermost block that matches
        part = next((p for p in prefixes(name) if any(matches(q, p) for q in patterns)), None)
        if part is not None:
            ends[part] = max(ends.get(part, 0), index)
    first, cuts = beginning(nodes, trained), set()
    for end in ends.values():
        place = end + 1
        while place > first and not divides(nodes, place):
            place -= 1
        cuts.add(place)
    cuts = {place for place in cuts if place < len(nodes)}
    if not cuts and names.keys() >= {*known}:
        raise ValueError(
            f"Model.recompute: {', '.join(patterns)} is the end of the network, where backward "
            "begins; name layers before it"
        )
    inside = sorted(place for place in cuts if place > first)
    return (first, *inside) if inside else ()


def names_of(node: Node) -> list[str]:
    """Return the names of all layers that a node computes."""
    layer = node.layer
    if isinstance(layer, NormAddReLU):
        return [str(part.name) for part in layer.parts]
    if isinstance(layer, FusedConv2d):
        return [node.name, *layer.absorbed]
    return [node.name]


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


class Dropping(Hook):
    """Drops the values of segments in forward.

    Parameters
    ----------
    segments : Segments
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments

    def forward(self, run: Run) -> Run:
        """Return a node's saved values, or the `DroppedSegment` that computes them again."""
        segments = self._segments
        dropped: DroppedSegment | None = None

        def dropping(node: Node, state: Any) -> Pass:
            nonlocal dropped
            y, saved = yield from run(node, state)
            if node.index in segments.checkpoints and isinstance(y, Recomputed):
                y = y.array
            if dropped is None or node.index >= dropped.segment.stop:
                segment = segments.of(node.index)
                dropped = None if segment is None else DroppedSegment(segment, state)
            if dropped is not None:
                dropped.add(node, saved, y)
                saved = dropped
            for source in node.inputs:
                value = state.values[source.index]
                if source.index in segments.checkpoints and isinstance(value, Deferred):
                    value.forget_terms()
            for index in node.releases:  # without dropping their arrays
                state.values[index] = None
            return y, saved

        return dropping


class DroppedSegment:
    """A segment of one pass whose values were dropped.

    Parameters
    ----------
    segment : Segment
    state : ForwardPass

    Attributes
    ----------
    outputs : dict of int to weakref
        Deferred outputs that nodes after the segment read. Their terms are values of the segment.
    """

    def __init__(self, segment: Segment, state: ForwardPass) -> None:
        self.segment = segment
        self.outputs: dict[int, weakref.ref[Deferred]] = {}
        self._values = {i: state.values[i] for i in segment.inputs}
        context = replace(state.context, recomputing=True)
        self._state = replace(state, context=context, values={}, residuals=[])
        self._kept: dict[int, Any] = {}

    def add(self, node: Node, saved: Saved, y: Value) -> None:
        """Keep the small values of a node that `forward_again` requires."""
        if isinstance(node.layer, Repeatable) and node.layer.repeats:
            self._kept[node.index] = node.layer.kept(saved)
        if node.index in self.segment.outputs and isinstance(y, Deferred):
            self.outputs[node.index] = weakref.ref(y)

    def restore(self, residuals: list[Saved], hooks: Sequence[Hook]) -> Pass:
        """Run the segment again, with hooks, and store the saved values of its nodes."""
        run, state = compose(self._run, hooks, "again"), replace(self._state, values=self._values)
        values, self._values = self._values, {}
        for node in self.segment.nodes:
            index = node.index
            y, saved = yield from run(node, state)
            before = self.outputs[index]() if index in self.outputs else None
            if before is not None and isinstance(y, Deferred):
                before.take_terms(y)
            values[index] = y
            if residuals[index] is self:
                residuals[index] = saved
            del y, saved, before
            for i in self.segment.releases[index]:
                values.pop(i, None)

    def _run(self, node: Node, state: ForwardPass) -> Pass:
        """Run a node, from what it has kept, if anything."""
        kept, layer = self._kept.pop(node.index, None), node.layer
        if kept is None or not isinstance(layer, Repeatable):
            return (yield from forward_node(node, state))
        xs = [layer.accept(state.values[i.index]) for i in node.inputs]
        return checked(node, state, layer.forward_again(*xs, context=state.context, kept=kept))


class Restoring(Hook):
    """Computes what the backward pass of a node requires, if it was dropped.

    A layer that finishes the gradient of a deferred input requires the terms of that input, which
    are values of the segment that has computed it.

    Parameters
    ----------
    hooks : sequence of Hook
        Of the forward passes that are repeated.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = hooks

    def backward(self, run: Run) -> Run:
        """Run segments again before the first of their nodes."""

        def restoring(node: Node, state: Any) -> Pass:
            dropped, layer = state.residuals[node.index], node.layer
            if isinstance(dropped, DroppedSegment):
                yield from dropped.restore(state.residuals, self._hooks)
            if isinstance(layer, Finisher) and layer.finishes:
                source = node.inputs[0].index
                dropped = state.residuals[source]
                if isinstance(dropped, DroppedSegment) and source in dropped.outputs:
                    yield from dropped.restore(state.residuals, self._hooks)
            del dropped
            return (yield from run(node, state))

        return restoring
