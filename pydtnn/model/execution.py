"""The forward and backward loops over a graph.

They compute what those of `pydtnn.model.naive` compute. Besides, they release arrays as early as
possible, sum gradients in place, and check what layers return; hooks (`pydtnn.model.passes`) do
everything else around the function that runs a node.

The loops are generators. At a layer that exchanges arrays with other ranks, or with other shards of
the batch, a loop yields what the layer asks for (`pydtnn.layers.collectives`) and is sent the
operation in progress (`run_together`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pydtnn.kernels import Deferred
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Finisher, Saved, StepContext
from pydtnn.layers.collectives import Collective, Pending
from pydtnn.layers.communicating import CommunicatingFinisher
from pydtnn.layers.recomputed import Recomputed, Value
from pydtnn.model.graph import Graph, Node
from pydtnn.model.partition.exchange import Exchange
from pydtnn.model.parts import GraphPart
from pydtnn.model.passes import Pass, Run, calls

CollectiveCall = tuple[Node, Collective]
"""A collective, and the node whose layer asks for it."""

Loop = Generator[CollectiveCall, Pending, Any]
"""Generator that yields collectives, receives them in progress, and returns its result."""

Communicate = Callable[[Sequence[CollectiveCall]], Sequence[Pending]]
"""Function that starts the same collective for each of several shards."""

End = Callable[[Any], Pass]
"""Called with a pass after its last node."""


@dataclass(slots=True)
class ForwardPass:
    """The arrays of a forward pass.

    Attributes
    ----------
    graph : Graph
    context : StepContext
    samples : int
    joint : bool
        Whether all shards are normalised together.
    trained : collection of int
        The nodes whose saved values are kept.
    values : list or dict of int to Value
        Outputs by the indices of nodes, until they are released.
    residuals : list
        For each node, what its backward requires.
    ends : list of callable
    """

    graph: Graph
    context: StepContext
    samples: int
    joint: bool
    trained: Collection[int]
    values: Any
    residuals: list[Saved]
    ends: list[End] = field(default_factory=list)

    def store(self, node: Node, y: Value, saved: Saved) -> None:
        """Store the result of a node."""
        self.values[node.index] = y
        if node.index in self.trained:
            self.residuals[node.index] = saved

    def release(self, node: Node) -> None:
        """Release outputs that no later node reads, and arrays that backward computes again."""
        for index in node.releases:
            value, self.values[index] = self.values[index], None
            if isinstance(value, Deferred):
                value.drop()


def forward_loop(
    graph: Graph,
    part: GraphPart,
    xs: tuple[Array, ...],
    context: StepContext,
    run: Run,
    after: Collection[Callable[[Node, Sequence[Value]], None]],
    *,
    keep: bool,
    joint: bool,
) -> Loop:
    """Run every node of a part in order by `run`, `forward_node` with hooks around it.

    The other parameters and the result are those of `Model.forward_shards`, for a shard. `after` is
    called after each node, with all outputs.
    """
    check_inputs("Model", xs, [node.shape for node in part.inputs])
    context = replace(context, differentiable=keep, batch=len(xs[0]))
    values: list[Value] = [None] * len(graph.nodes)
    residuals: list[Saved] = [None] * len(graph.nodes)
    trained = graph.trained if keep else ()
    state = ForwardPass(graph, context, len(xs[0]), joint, trained, values, residuals)
    for node, x in zip(part.inputs, xs, strict=True):
        values[node.index] = in_model_dtype(graph, x)
    residuals[0] = context if keep else None  # an input saves nothing
    for node in part.layers:
        state.store(node, *(yield from run(node, state)))
        state.release(node)
        for call in after:
            call(node, values)
    for end in state.ends:
        yield from end(state)
    outputs = tuple(n.layer.wide(n.layer.array(values[n.index])) for n in part.outputs)
    return (outputs if len(outputs) > 1 else outputs[0]), residuals


def forward_node(node: Node, state: ForwardPass) -> Pass:
    """Run a node; return its output and what its backward requires."""
    layer: Any = node.layer
    xs = [layer.accept(state.values[i.index]) for i in node.inputs]
    context, joint = state.context, state.joint
    if layer.communicates(training=context.training, joint=joint):
        result = yield from calls(node, layer.forward_steps(*xs, context=context, joint=joint))
    else:
        result = layer.forward(*xs, context=context)
    return checked(node, state, result)


class BackwardPass:
    """The arrays of a backward pass: the gradient of each output, summed over its readers.

    Parameters
    ----------
    graph : Graph
    residuals : list
        For each node, what its backward requires.
    joint : bool
        Whether all shards are normalised together.

    Attributes
    ----------
    context : StepContext
        Of the forward pass, which has left it in place of the residual of an input.
    sums : dict of int to (Array, bool)
        By the index of a node, with whether the memory may be overwritten.
    ends : list of callable
    """

    def __init__(self, graph: Graph, residuals: list[Saved], *, joint: bool) -> None:
        self.graph, self.residuals, self.joint = graph, residuals, joint
        self.context, residuals[0] = residuals[0], None
        self.ends: list[End] = []
        self.sums: dict[int, tuple[Any, bool]] = {}

    def add(self, node: Node, dx: Array, *, new: bool) -> None:
        """Add `dx` to a gradient; if it is `new`, its memory may be overwritten."""
        if node.index in self.sums:
            so_far, owned = self.sums[node.index]
            backend = self.graph.backend
            out = so_far if owned else dx if new else backend.empty(dx.shape, dx.dtype)
            backend.elementwise.add(so_far, dx, out=out)
            dx, new = out, True
        self.sums[node.index] = dx, new

    def owns(self, node: Node) -> bool:
        """Return whether the sum so far, if any, may be overwritten."""
        return self.sums.get(node.index, (None, True))[1]

    def take(self, node: Node) -> Any:
        """Return and remove the sum; None if there is none."""
        return self.sums.pop(node.index, (None, False))[0]


def backward_loop(
    graph: Graph,
    part: GraphPart,
    dys: tuple[Array, ...],
    residuals: list[Saved],
    run: Run,
    after: Collection[Callable[[Node], None]],
    *,
    joint: bool,
) -> Loop:
    """Run every node's backward in a part by `run`, `backward_node` with hooks around it.

    The other parameters and the result are those of `Model.backward_shards`, for a shard. `after`
    is called after each node.
    """
    state = BackwardPass(graph, residuals, joint=joint)
    for node, dy in zip(part.outputs, dys, strict=True):
        shapes = (node.shape, *(source.shape for source in node.inputs if _may_remain_cut(node)))
        if dy.shape[1:] not in shapes:
            raise ValueError(
                f"Model.backward: expected a gradient of shape {batched(node.shape)}, like the "
                f"output, got {dy.shape}"
            )
        state.add(node, in_model_dtype(graph, dy), new=False)
    for node in reversed(part.layers):
        if node.index in graph.trained:
            yield from run(node, state)
        else:
            state.take(node)
            residuals[node.index] = None
        for call in after:
            call(node)
    for end in state.ends:
        yield from end(state)
    dxs = ((node, state.take(node)) for node in part.inputs)
    dx = tuple(None if g is None else node.layer.wide(g) for node, g in dxs)
    return dx[0] if len(dx) == 1 else dx


def backward_node(node: Node, state: BackwardPass) -> Pass:
    """Run the backward pass of a node; add the gradients of its inputs to those of others."""
    layer: Any = node.layer
    saved, dy = state.residuals[node.index], layer.accept(state.take(node))
    last = finishes(node, state)
    if layer.communicates(training=True, joint=state.joint):
        if last and isinstance(layer, CommunicatingFinisher):
            steps = layer.finish_steps(dy, saved, state.take(node.inputs[0]))
        else:
            steps = layer.backward_steps(dy, saved, joint=state.joint)
        dxs = yield from calls(node, steps)
    elif last:
        dxs = layer.finish_backward(dy, saved, state.take(node.inputs[0]))
    else:
        dxs = layer.backward(dy, saved)
    state.residuals[node.index] = None
    deliver(node, state, dxs)


def finishes(node: Node, state: BackwardPass) -> bool:
    """Return whether a layer adds its contribution to the others' in its own kernel."""
    layer = node.layer
    return isinstance(layer, Finisher) and layer.finishes and state.owns(node.inputs[0])


def deliver(node: Node, state: BackwardPass, dxs: Any) -> None:
    """Add the gradients of a node's inputs to those that other readers have computed."""
    if not node.layer.needs_dx:
        return
    graph, several = state.graph, dxs if isinstance(dxs, tuple) else (dxs,)
    new = "gradient" in node.layer.new_results
    for position, (source, dx) in enumerate(zip(node.inputs, several, strict=True)):
        if source.index in graph.trained:
            if dx is None or dx.shape[1:] != source.shape:
                given = "None" if dx is None else f"shape {dx.shape}"
                raise ValueError(
                    f"{node.name}: backward of {type(node.layer).__name__} must return a "
                    f"gradient of shape {source.shape} besides the batch, got {given}"
                )
            passes = isinstance(dx, Deferred) and (
                dx.array is not None  # the whole gradient, from `finish_backward`
                or (
                    "deferred" in source.layer.supports
                    and len(source.consumers) == 1
                    and source not in graph.outputs  # whose gradient has another term
                )
            )
            pitched = position in node.pitched
            dx = dx if passes or pitched else in_model_dtype(graph, node.layer.array(dx))
            state.add(source, dx, new=new and not pitched)


def in_model_dtype(graph: Graph, array: Value) -> Value:
    """Return an output in the type and order of axes that kernels require."""
    if isinstance(array, Deferred):
        return array
    if isinstance(array, Recomputed):
        if array.dtype == graph.dtype:
            return array
        array = array.array
    # Kernels require C order and the model's dtype; a custom layer may return a transposed view, or
    # float32 in a 16-bit model.
    backend, dtype = graph.backend, graph.dtype
    if array.dtype == dtype or array.dtype != arithmetic(dtype):
        return backend.asarray(array, dtype)
    rounded = backend.empty(array.shape, dtype)
    backend.elementwise.convert(backend.asarray(array), out=rounded)
    return rounded


def checked(node: Node, state: ForwardPass, result: Any) -> tuple[Value, Saved]:
    """Return the result of a layer's forward in the model's type, if it is that of `build`."""
    kind = type(node.layer).__name__
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"{node.name}: forward of {kind} must return a pair (output, saved), got "
            f"{type(result).__name__}; saved may be None"
        )
    shape = getattr(result[0], "shape", None)
    remains_cut = state.context.cut_outputs and _may_remain_cut(node)
    expected = node.inputs[0].shape if remains_cut else node.shape
    if shape is None or shape[1:] != expected or shape[0] != state.samples:
        given = type(result[0]).__name__ if shape is None else f"shape {tuple(shape)}"
        raise ValueError(
            f"{node.name}: forward of {kind} must return {state.samples} outputs of shape "
            f"{node.shape}, as returned by build, got {given}"
        )
    return in_model_dtype(state.graph, result[0]), result[1]


def _may_remain_cut(node: Node) -> bool:
    return isinstance(node.layer, Exchange) and node.layer.optional


def run_together(
    loops: Sequence[Loop],
    communicate: Communicate | None,
    before: Sequence[Callable[[int], None]] = (),
) -> list[Any]:
    """Run generators in turn to their next collective, then send each the operation, and repeat.

    Parameters
    ----------
    loops : sequence of Loop
        All yield the same collectives.
    communicate : Communicate or None
        Starts a collective of all generators. None: there are no ranks to communicate with.
    before : sequence of callable
        Called with the position of a generator before it continues.

    Returns
    -------
    list
        The results of the generators.

    Raises
    ------
    ValueError
        If a layer communicates, and there are no ranks to communicate with.
    """
    results: list[Any] = [None] * len(loops)
    send: Sequence[Any] = [None] * len(loops)  # None starts a generator
    while True:
        asked: list[CollectiveCall] = []
        for position, (loop, pending) in enumerate(zip(loops, send, strict=True)):
            for call in before:
                call(position)
            try:
                asked.append(loop.send(pending))
            except StopIteration as end:
                results[position] = end.value
        if not asked:
            return results
        if communicate is None:
            raise ValueError(
                f"{asked[0][0].name}: this layer exchanges arrays with other ranks; construct the "
                "model with mesh=Mesh(comm, ...)"
            )
        send = communicate(asked)
        del asked


def check_inputs(who: str, inputs: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError if arrays are not equally many samples of these shapes.

    Raises
    ------
    ValueError
    """
    given = [np.shape(x) for x in inputs]
    if [shape[1:] for shape in given] == [*shapes] and len({shape[:1] for shape in given}) == 1:
        return
    turned = len(given[0]) == 4 and (*given[0][2:], given[0][1]) == shapes[0]
    hint = "; use x.transpose(0, 2, 3, 1), channels come last" if turned else ""
    if given == [*shapes]:
        hint = "; use x[None] for a batch of one sample"
    raise ValueError(
        f"{who}: expected an array of shape {' and '.join(map(batched, shapes))}, "
        f"got {' and '.join(map(str, given))}{hint}"
    )


def batched(shape: tuple[int, ...]) -> str:
    """Format the shape of n samples.

    >>> batched((3, 4))
    '(n, 3, 4)'
    """
    return f"({', '.join(['n', *map(str, shape)])})"
