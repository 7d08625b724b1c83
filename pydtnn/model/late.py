"""Passes of layers that only exchange arrays: other layers run while their messages travel."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from pydtnn.model.graph import Node

Pass = Generator[Any, Any, Any]
"""The pass of a layer, which yields collectives and is sent the operations in progress."""


class LatePasses:
    """Passes of a loop that have started their messages and whose results have not been read.

    All ranks start and finish them in the same order, that of the graph.
    """

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Node, Pass, Any]] = {}

    def begin(self, node: Node, run: Pass) -> Pass:
        """Run a node to its first collective; return whether it is in progress, and the result."""
        try:
            asked = next(run)
        except StopIteration as end:
            return False, end.value
        self._begun[node.index] = node, run, (yield asked)
        return True, None

    def of_all(self) -> list[Node]:
        """Return all nodes in progress."""
        return [node for node, *_ in self._begun.values()]

    def of(self, node: Node) -> list[Node]:
        """Return the nodes in progress whose outputs a node reads."""
        if not self._begun:
            return []
        return [s for s in dict.fromkeys(node.inputs) if s.index in self._begun]

    def towards(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes in progress that read an output of one of these nodes."""
        if not self._begun:
            return []
        return [n for n in self.of_all() if any(source in nodes for source in n.inputs)]

    def finish(self, node: Node) -> Pass:
        """Run the rest of a node; return its result."""
        _, run, pending = self._begun.pop(node.index)
        while True:
            try:
                asked = run.send(pending)
            except StopIteration as end:
                return end.value
            pending = yield asked


def may_be_late(node: Node) -> bool:
    """Return whether a node has no kernels, so that others can run while its messages travel."""
    return node.layer.only_communicates
