"""What features do around the pass of a node.

The loops (`pydtnn.model.execution`) run a node by a function, a `Run`. A feature is a `Hook`, which
puts another function in its place: a network without the feature has the function as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydtnn.layers.communicating import OnlyCommunicating
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Bucket
from pydtnn.layers.recomputed import Regathered
from pydtnn.utils.observer import HALVES, RECOMPUTED, Kind, Observer
from pydtnn.utils.split import even_cut

Pass = Generator[Any, Any, Any]
"""The pass of a layer, which yields collectives and is sent the operations in progress."""

Run = Callable[[Node, Any], Pass]
"""Runs a node of a pass, whose arrays are in a `ForwardPass` or a `BackwardPass`."""


class Hook:
    """What a feature does around the passes of nodes; by default nothing.

    Attributes
    ----------
    refreshes : bool
        Whether the feature rounds trained parameters into their working copies, instead of
        `Model.refresh`.
    """

    refreshes = False

    def forward(self, run: Run) -> Run:
        """Return the function that runs a node forward: it calls `run`, which did so before."""
        return run

    def backward(self, run: Run) -> Run:
        """Return the function that runs a node backward."""
        return run

    def again(self, run: Run) -> Run:
        """Return the function that runs a node forward again, by default as the first time."""
        return self.forward(run)

    def parameters(self, run: Run) -> Run:
        """Return the function that runs the second half of a node's backward."""
        return run

    def begin(self) -> Callable[[int], None]:
        """Return what is called with a shard before its pass begins, or continues after others."""
        return lambda shard: None


Way = Literal["forward", "backward", "again", "parameters"]


def compose(run: Run, hooks: Iterable[Hook], way: Way) -> Run:
    """Return the function that runs a node with hooks, the innermost first."""
    for hook in hooks:
        run = getattr(hook, way)(run)
    return run


class Reports(Hook):
    """Report the passes of layers to an observer.

    Parameters
    ----------
    observer : Observer
    several : bool
        Whether shards alternate. A layer that waits for other ranks is then interrupted by other
        layers: its activity ends, and another one begins when it continues.
    late : bool
        Whether passes of layers that only exchange arrays are interrupted in forward, too.
    suffix : callable, optional
        Returns what follows the name of a node in backward.
    """

    def __init__(
        self,
        observer: Observer,
        *,
        several: bool = False,
        late: bool = True,
        suffix: Callable[[Node], str] = lambda node: "",
    ) -> None:
        self._observer, self._several, self._late, self._suffix = observer, several, late, suffix

    @classmethod
    def to(cls, observer: Observer | None, **options: Any) -> tuple[Reports, ...]:
        """Return the reports to an observer, if there is one."""
        return () if observer is None else (cls(observer, **options),)

    def forward(self, run: Run) -> Run:
        """Report forward passes."""
        return self._reported(run, Kind.FORWARD, lambda node: "", self._late)

    def backward(self, run: Run) -> Run:
        """Report backward passes."""
        return self._reported(run, Kind.BACKWARD, self._suffix, True)

    def again(self, run: Run) -> Run:
        """Report recomputation."""
        return self._reported(run, Kind.FORWARD, lambda node: RECOMPUTED, False)

    def parameters(self, run: Run) -> Run:
        """Report second halves of backward."""
        return self._reported(run, Kind.BACKWARD, lambda node: HALVES[1], False)

    def _reported(self, run: Run, kind: Kind, suffix: Callable[[Node], str], late: bool) -> Run:
        observer = self._observer

        def reported(node: Node, state: Any) -> Pass:
            activity, pending = (kind, node.name + suffix(node)), None
            observer.begin(*activity)
            try:
                passed = run(node, state)
                if not (self._several or (late and may_be_late(node))):
                    return (yield from passed)
                while True:
                    try:
                        call = passed.send(pending)
                    except StopIteration as end:
                        return end.value
                    observer.end()
                    try:
                        pending = yield call
                    finally:
                        observer.begin(*activity)
            finally:
                observer.end()

        return reported


class BatchParts(Hook):
    """Layers that a rank runs on its part of the batch: see `Layer.batch_part`."""

    def forward(self, run: Run) -> Run:
        """Run such layers with the context and the number of samples of the part."""

        def of_part(node: Node, state: Any) -> Pass:
            if node.layer.batch_part is not None:
                (place, ranks), context = node.layer.batch_part, state.context
                first, last = (even_cut(context.batch, ranks, p) for p in (place, place + 1))
                if context.samples is not None:
                    context = replace(context, samples=context.samples[first:last])
                state = replace(state, context=context, samples=last - first)
            return run(node, state)

        return of_part


class GatheredOutputs(Hook):
    """Outputs that are gathered from ranks again, before backward of the layer that reads them."""

    def backward(self, run: Run) -> Run:
        """Gather the saved values of a node."""

        def gathering(node: Node, state: Any) -> Pass:
            saved = state.residuals[node.index]
            if isinstance(saved, Regathered):
                state.residuals[node.index] = yield from calls(node.inputs[0], saved.steps())
            return (yield from run(node, state))

        return gathering


def calls(node: Node | None, steps: Pass, pending: Any = None) -> Pass:
    """Run a pass, or the rest of it; yield each collective, with the node of a layer's pass."""
    while True:
        try:
            call = steps.send(pending)
        except StopIteration as end:
            return end.value
        pending = yield call if node is None else (node, call)


class LatePasses(Hook):
    """Passes without kernels start their messages, and end when their results are read.

    Other layers run meanwhile. All ranks start and end them in the same order, that of the graph.
    """

    def forward(self, run: Run) -> Run:
        """End the passes of those nodes first whose outputs a node reads."""
        return _late(run, lambda late, node: [s for s in dict.fromkeys(node.inputs) if s in late])

    def backward(self, run: Run) -> Run:
        """End those first that add to the gradient of a node's output, or of its inputs."""

        def due(late: Iterable[Node], node: Node) -> list[Node]:
            summed = (node, *node.inputs)
            return [n for n in late if any(source in summed for source in n.inputs)]

        return _late(run, due)


def _late(run: Run, due: Callable[[dict[Node, Pass], Node], list[Node]]) -> Run:
    late: dict[Node, Pass] = {}

    def end(nodes: Sequence[Node], state: Any) -> Pass:
        for node in nodes:
            result = yield from late.pop(node)
            if result is not None:
                state.store(node, *result)

    def end_all(state: Any) -> Pass:
        return end([*late], state)

    def begin(node: Node, state: Any) -> Pass:
        if late:
            yield from end(due(late, node), state)
        passed = run(node, state)
        if not may_be_late(node):
            return (yield from passed)
        try:
            call = next(passed)
        except StopIteration as finished:
            return finished.value
        if end_all not in state.ends:
            state.ends.append(end_all)
        late[node] = calls(None, passed, (yield call))
        return None, None

    return begin


def may_be_late(node: Node) -> bool:
    """Return whether a node has no kernels, so that others can run while its messages travel."""
    return isinstance(node.layer, OnlyCommunicating)


class BucketReporter:
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
