"""Passes of layers in a loop: their reports, those that wait, and buckets that are ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from pydtnn.layers.communicating import OnlyCommunicating
from pydtnn.layers.parameters import Bucket
from pydtnn.model.graph import Node
from pydtnn.model.recompute import Run
from pydtnn.utils.observer import RECOMPUTED, Kind, Observer


class Reports:
    """Report the passes of the layers of one forward or backward pass of the model.

    Parameters
    ----------
    observer : Observer
    shards : int
        Shards that alternate. If there are several, a layer that waits for other ranks is
        interrupted by other layers: its activity ends, and another one begins when it continues.
    """

    def __init__(self, observer: Observer, shards: int) -> None:
        self._observer, self._interrupted = observer, shards > 1

    @classmethod
    def to(cls, observer: Observer | None, shards: int) -> Reports | None:
        """Return the reports to an observer, None if there is none."""
        return None if observer is None else cls(observer, shards)

    def begin(self, kind: Kind, name: str, waits: bool = False) -> None:
        """Begin the pass of a node, unless it is `interrupted`."""
        if not (self._interrupted or waits):
            self._observer.begin(kind, name)

    def end(self, waits: bool = False) -> None:
        """End what `begin` has begun."""
        if not (self._interrupted or waits):
            self._observer.end()

    def interrupted(self, run: Pass, kind: Kind, name: str, waits: bool) -> Pass:
        """Return a pass that ends its activity where others run while it waits."""
        return self._parts(run, kind, name) if self._interrupted or waits else run

    def _parts(self, run: Pass, kind: Kind, name: str) -> Pass:
        observer, pending = self._observer, None
        observer.begin(kind, name)
        try:
            while True:
                try:
                    call = run.send(pending)
                except StopIteration as end:
                    return end.value
                observer.end()
                try:
                    pending = yield call
                finally:
                    observer.begin(kind, name)
        finally:
            observer.end()

    def recomputed(self, run: Callable[..., Pass]) -> Run:
        """Return a function that runs a node again as an activity."""

        def again(node: Any, *args: Any) -> Pass:
            name = node.name + RECOMPUTED
            if self._interrupted:
                return (yield from self._parts(run(node, *args), Kind.FORWARD, name))
            with self._observer.activity(Kind.FORWARD, name):
                return (yield from run(node, *args))

        return again


Pass = Generator[Any, Any, Any]
"""The pass of a layer, which yields collectives and is sent the operations in progress."""


class LatePasses:
    """Passes of a loop that have started their messages and whose results have not been read.

    All ranks start and finish them in the same order, that of the graph.
    """

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Node, Pass, Any]] = {}

    def begin(self, node: Node, run: Pass, waits: bool) -> Pass:
        """Run a node, or start one that `waits`; return whether it only began, and the result."""
        if not waits:
            return False, (yield from run)
        try:
            call = next(run)
        except StopIteration as end:
            return False, end.value
        self._begun[node.index] = node, run, (yield call)
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
                call = run.send(pending)
            except StopIteration as end:
                return end.value
            pending = yield call


def may_be_late(node: Node) -> bool:
    """Return whether a node has no kernels, so that others can run while its messages travel."""
    return isinstance(node.layer, OnlyCommunicating)


class Ready:
    """Report each bucket as soon as the node that completes its gradients has run."""

    def __init__(
        self, buckets: Iterable[Bucket], on_ready: Callable[[Bucket, int], None] | None, shard: int
    ) -> None:
        self._buckets = deque(buckets)
        self._on_ready, self._shard = on_ready, shard

    def after(self, node: Node) -> None:
        """Called after each node of backward."""
        while self._buckets and self._buckets[0].ready_at == node.index:
            bucket = self._buckets.popleft()
            if self._on_ready:
                self._on_ready(bucket, self._shard)
