"""Where the order of execution is cut into segments that backward recomputes.

A cut is the index of a node: its segment ends before it. In forward, values that cross a cut are
kept, and those inside a segment are dropped. With ``kept(a, j)`` the bytes that the nodes from a to
j save for backward, ``size(j)`` those of the output of j, and ``cross(a, b)`` those of the outputs
of nodes from a on that cross b, the memory while backward runs the segment from a to b is about ::

    held(a) + max over j of kept(a, j) + g size(j),    held(b) = held(a) + cross(a, b)

with g gradients of this size at a time, 1 to 3, which depends on the network. The same holds for
the part after the last cut, which is not dropped. Everything before the last cut runs again. The
best segments for a bound of this memory are found by dynamic programming, for several bounds and g;
those that are used are chosen by the exact forecast.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.node import Node
from pydtnn.utils.selection import matches, prefixes, select

TRIALS = 16
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
            for _ in range(TRIALS):
                middle = (low + high) / 2
                possible = self.below(middle, gradients) is not None
                low, high = (low, middle) if possible else (middle, high)
            found += [self.below(bound, gradients) for bound in np.linspace(whole, high, TRIALS)]
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
