"""The buckets whose values the passes of layers read, for schemes that keep parts of them only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Bucket
from pydtnn.layers.recomputed import Recomputing
from pydtnn.model.partition.exchange import Exchange
from pydtnn.model.passes import Hook, Pass, Run

BeforeLayer = Callable[[Sequence[Bucket], Sequence[Bucket]], None]
"""Called with the buckets that the next pass of a layer reads, and those of later passes."""

Reads = dict[int, tuple[list[Bucket], list[Bucket]]]
"""By the index of a node, its buckets, and those of the first later node with others."""


class Presence(Hook):
    """Tells a scheme before the pass of each layer with parameters which buckets it reads.

    Parameters
    ----------
    nodes : sequence of Node
    trained : collection of int
        Indices of the nodes that run backward.
    buckets : sequence of Bucket
    before_layer : callable
    """

    refreshes = True

    def __init__(
        self,
        nodes: Sequence[Node],
        trained: Collection[int],
        buckets: Sequence[Bucket],
        before_layer: BeforeLayer,
    ) -> None:
        self._before_layer = before_layer
        self._shard = 0
        self._told: dict[int, tuple[Sequence[Bucket], Sequence[Bucket]]] = {}  # of each shard
        self._forward, self._backward = reads_of(nodes, trained, buckets)

    def begin(self) -> Callable[[int], None]:
        """Return what is called with a shard before its pass begins, or continues after others.

        Their layers may have released what the layer of this shard reads.
        """
        self._told = {}
        return self._continue

    def _continue(self, shard: int) -> None:
        self._shard = shard
        if shard in self._told:
            self._before_layer(*self._told[shard])

    def _tell(self, now: Sequence[Bucket], ahead: Sequence[Bucket]) -> None:
        self._told[self._shard] = now, ahead
        self._before_layer(now, ahead)

    def forward(self, run: Run) -> Run:
        """Tell before a node's forward pass; in recomputation without what later nodes read."""

        def present(node: Node, state: Any) -> Pass:
            if node.index in self._forward:
                now, ahead = self._forward[node.index]
                self._tell(now, [] if state.context.recomputing else ahead)
            return run(node, state)

        return present

    def backward(self, run: Run) -> Run:
        """Tell before a node's backward pass, or the first half of it."""

        def present(node: Node, state: Any) -> Pass:
            if node.index in self._backward:
                self._tell(*self._backward[node.index])
            return run(node, state)

        return present

    parameters = backward  # the second half


def reads_of(
    nodes: Sequence[Node], trained: Collection[int], buckets: Sequence[Bucket]
) -> tuple[Reads, Reads]:
    """Return what the nodes read in forward and in backward."""
    of = {entry.name: bucket for bucket in buckets for entry in bucket.parameters}

    def read(nodes: Sequence[Node]) -> list[Bucket]:
        names = [p.name for node in nodes for p in node.layer.parameters]
        return list({of[name].index: of[name] for name in names if name in of}.values())

    backward = [node for node in reversed(nodes) if node.index in trained]
    return (
        _with_next([(node, read([node])) for node in nodes]),
        _with_next([(node, read([node, *recomputed(node)])) for node in backward]),
    )


def recomputed(node: Node) -> list[Node]:
    """Return the nodes whose output the backward pass of a node computes again."""
    found = []
    for source in node.inputs:
        while isinstance(source.layer, Exchange):
            source = source.inputs[0]
        if isinstance(source.layer, Recomputing) and source.layer.recomputed:
            found.append(source)
    return found


def _with_next(reads: Sequence[tuple[Node, list[Bucket]]]) -> Reads:
    """Add to the buckets of nodes, in the order of a pass, those that are read next."""
    result: Reads = {}
    later: list[list[Bucket]] = []
    for node, now in reversed(reads):
        if now:
            ahead = next((n for n in reversed(later) if any(b not in now for b in n)), [])
            result[node.index] = now, [bucket for bucket in ahead if bucket not in now]
            later.append(now)
    return result
