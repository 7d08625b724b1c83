"""The forward and backward loops over a graph.

The loops are generators. At a layer that exchanges arrays with other ranks, or with other shards of
the batch, a loop yields what the layer asks for (`pydtnn.layers.collectives`) and is sent the
operation in progress (`run_together`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np

from pydtnn.kernels import Backend, Deferred
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Finisher, Layer, Saved, StepContext
from pydtnn.layers.collectives import Collective, Pending, Steps
from pydtnn.layers.communicating import Communicating, CommunicatingFinisher
from pydtnn.layers.exchange import Exchange
from pydtnn.layers.parameters import Bucket
from pydtnn.layers.recomputed import GatheredAgain, Recomputed, Value
from pydtnn.layers.repeatable import Repeatable
from pydtnn.model.graph import Graph, Node
from pydtnn.model.parts import Part
from pydtnn.model.passes import LatePasses, Ready, Reports, may_be_late
from pydtnn.model.recompute import KEPT_ALL, Recorder, Run, Segments, has_dropped, restore
from pydtnn.utils.observer import HALVES, Kind
from pydtnn.utils.split import even_cut

CollectiveCall = tuple[Node, Collective]
"""A collective, and the node whose layer asks for it."""

Loop = Generator[CollectiveCall, Pending, Any]
"""Generator that yields collectives, receives them in progress, and returns its result."""

Communicate = Callable[[Sequence[CollectiveCall]], Sequence[Pending]]
"""Function that starts the same collective for each of several shards."""


def forward_loop(
    graph: Graph,
    part: Part,
    x: Array | tuple[Array, ...],
    context: StepContext,
    keep: bool,
    after_node: Callable[[Node, Array], None] | None,
    *,
    joint: bool,
    segments: Segments = KEPT_ALL,
    progress: Callable[[], None] | None = None,
    reports: Reports | None = None,
) -> Loop:
    """Run every node of a part in order; if `joint`, all shards are normalised together.

    The parameters and the result are those of `Model.forward`; the values of `segments` are dropped
    for backward to recompute them. `progress` is called after each node. `reports` tell an observer
    of each node.
    """
    inputs = x if isinstance(x, tuple) else (x,)
    check_inputs("Model", inputs, [node.shape for node in part.inputs])
    samples = len(inputs[0])
    if context.differentiable is not keep:
        context = replace(context, differentiable=keep)
    if graph.cuts_batch:
        context = replace(context, batch=samples)
    values: list[Value] = [None] * len(graph.nodes)
    for node, x in zip(part.inputs, inputs, strict=True):
        values[node.index] = _in_model_dtype(graph, x)
    recorder = Recorder(graph.trained if keep else (), segments, values, context, samples)
    if graph.rounder:
        recorder.residuals[0] = context  # for backward; an input saves nothing
    late = LatePasses()

    def store(node: Node, result: tuple[Value, Saved]) -> None:
        y, checkpoint = result[0], node.index in segments.checkpoints
        values[node.index] = y.array if checkpoint and isinstance(y, Recomputed) else y
        if keep:
            recorder.save(node, result[1])

    for node in part.layers:
        for source in late.of(node):
            store(source, (yield from late.finish(source)))
        waits = may_be_late(node) and after_node is None and not segments.parts
        run = _forward_node(graph, node, values, context, samples, joint=joint)
        try:
            if reports:
                run = reports.interrupted(run, Kind.FORWARD, node.name, waits)
                reports.begin(Kind.FORWARD, node.name, waits)
            begun, result = yield from late.begin(node, run, waits)
        finally:
            if reports:
                reports.end(waits)
        if not begun:
            store(node, result)
        del run, result
        recorder.release(node.releases)
        if progress:
            progress()
        if after_node:
            after_node(node, node.layer.array(values[node.index]))
    for node in late.of_all():
        store(node, (yield from late.finish(node)))
    outputs = tuple(n.layer.wide(n.layer.array(values[n.index])) for n in part.outputs)
    return (outputs if len(outputs) > 1 else outputs[0]), recorder.residuals


def _forward_node(
    graph: Graph,
    node: Node,
    values: Sequence[Value] | Mapping[int, Value],
    context: StepContext,
    samples: int,
    kept: Any = None,
    *,
    joint: bool,
) -> Generator[CollectiveCall, Pending, tuple[Value, Saved]]:
    """Run one node, with the outputs of others by index, and `kept` if the pass is repeated."""
    if graph.presence:
        graph.presence.forward(node, again=context.recomputing)
    layer = node.layer
    xs = [layer.accept(values[i.index]) for i in node.inputs]
    if layer.batch_part is not None:
        context, samples = part_of_batch(context, samples, *layer.batch_part)
    if graph.rounder:
        xs = [graph.rounder.input(layer, x, context) for x in xs]
    if kept is not None and isinstance(layer, Repeatable):
        result = layer.forward_again(*xs, context=context, kept=kept)
    elif communicates(layer, training=context.training, joint=joint):
        result = yield from _calls(node, layer.forward_steps(*xs, context=context, joint=joint))
    else:
        result = layer.forward(*xs, context=context)
    y, saved = _checked(node, samples, result, context)
    return _in_model_dtype(graph, y), saved


def backward_loop(
    graph: Graph,
    part: Part,
    buckets: Sequence[Bucket],
    dy: Array | tuple[Array, ...],
    residuals: list[Saved],
    on_ready: Callable[[Bucket, int], None] | None,
    after_node: Callable[[Node], None] | None,
    *,
    joint: bool,
    shard: int,
    inputs_only: bool = False,
    reports: Reports | None = None,
) -> Loop:
    """Run every node's backward in a part; if `joint`, all shards are normalised together.

    The parameters and the result are those of `Model.backward_shards`; `on_ready` is given `shard`.
    If `inputs_only`, `residuals` keep what `parameters_loop` requires. `reports` tell an observer
    of each node.
    """
    sums = _Gradients(graph.backend)
    recomputes = has_dropped(residuals)
    again: Run = partial(_forward_node, graph, joint=joint)
    if reports:
        again = reports.recomputed(again)
    for node, g in zip(part.outputs, dy if isinstance(dy, tuple) else (dy,), strict=True):
        shapes = (node.shape, *(source.shape for source in node.inputs if _may_remain_cut(node)))
        if g.shape[1:] not in shapes:
            raise ValueError(
                f"Model.backward: expected a gradient of shape {batched(node.shape)}, like the "
                f"output, got {g.shape}"
            )
        sums.add(node, _in_model_dtype(graph, g), new=False)
    del dy
    ready = Ready(() if inputs_only else buckets, on_ready, shard)
    late = LatePasses()
    for node in reversed(part.layers):
        for reader in late.towards((node, *node.inputs)):
            yield from late.finish(reader)
        if node.index in graph.trained:
            if recomputes:
                yield from restore(node, residuals, again)
            waits = may_be_late(node)
            run = _backward_node(graph, node, residuals, sums, joint=joint, inputs_only=inputs_only)
            try:
                if reports:
                    name = node.name + (HALVES[0] if inputs_only and has_halves(node.layer) else "")
                    run = reports.interrupted(run, Kind.BACKWARD, name, waits)
                    reports.begin(Kind.BACKWARD, name, waits)
                yield from late.begin(node, run, waits)
            finally:
                if reports:
                    reports.end(waits)
            del run
        else:
            sums.take(node)
            residuals[node.index] = None
        ready.after(node)
        if after_node:
            after_node(node)
    for reader in late.of_all():
        yield from late.finish(reader)
    dxs = ((node, sums.take(node)) for node in part.inputs)
    dx = tuple(None if g is None else node.layer.wide(g) for node, g in dxs)
    return dx if len(dx) > 1 else dx[0]


def parameters_loop(
    graph: Graph,
    part: Part,
    buckets: Sequence[Bucket],
    residuals: list[Saved],
    on_ready: Callable[[Bucket, int], None] | None,
    after_node: Callable[[Node], None] | None,
    reports: Reports | None = None,
) -> None:
    """Compute the gradients of parameters that `backward_loop` has left in `residuals`.

    The parameters are those of `Model.backward_parameters`.
    """
    ready = Ready(buckets, on_ready, 0)
    for node in reversed(part.layers):
        if (left := residuals[node.index]) is not None:
            residuals[node.index] = None
            if graph.presence:
                graph.presence.backward(node)
            if reports:
                reports.begin(Kind.BACKWARD, node.name + HALVES[1])
            node.layer.backward_parameters(left)
            del left
            if reports:
                reports.end()
        ready.after(node)
        if after_node:
            after_node(node)


def has_halves(layer: Layer) -> bool:
    """Return whether a layer's first half of backward leaves something to the second."""
    own = type(layer).backward_inputs is not Layer.backward_inputs
    return own and layer.trainable and not layer.communicates(training=True, joint=False)


def _backward_node(
    graph: Graph,
    node: Node,
    residuals: list[Saved],
    sums: _Gradients,
    *,
    joint: bool,
    inputs_only: bool,
) -> Generator[CollectiveCall, Pending, None]:
    """Run the backward pass of one node, and add the gradients of its inputs to `sums`.

    If `inputs_only`, a layer in two halves leaves in `residuals` what its second half requires.
    """
    if graph.presence:
        graph.presence.backward(node)
    layer, saved = node.layer, residuals[node.index]
    if isinstance(saved, GatheredAgain):
        saved = yield from _calls(node.inputs[0], saved.steps())
    g, left = layer.accept(sums.take(node)), None
    if graph.rounder:
        g = graph.rounder.gradient(layer, g, residuals[0])
    if communicates(layer, training=True, joint=joint):
        if _finishes(node, sums) and isinstance(layer, CommunicatingFinisher):
            steps = layer.finish_steps(g, saved, sums.take(node.inputs[0]))
        else:
            steps = layer.backward_steps(g, saved, joint=joint)
        dxs = yield from _calls(node, steps)
    elif _finishes(node, sums) and isinstance(layer, Finisher):
        dxs = layer.finish_backward(g, saved, sums.take(node.inputs[0]))
    elif inputs_only:
        dxs, left = layer.backward_inputs(g, saved)
    else:
        dxs = layer.backward(g, saved)
    residuals[node.index] = left
    if layer.needs_dx:
        _deliver(graph, node, dxs if isinstance(dxs, tuple) else (dxs,), sums)


def part_of_batch(
    context: StepContext, samples: int, place: int, ranks: int
) -> tuple[StepContext, int]:
    """Return the context of a rank's part of a batch, and the number of samples in it."""
    first, last = (even_cut(samples, ranks, p) for p in (place, place + 1))
    if context.samples is not None:
        context = replace(context, samples=context.samples[first:last])
    return context, last - first


def communicates(layer: Layer, *, training: bool, joint: bool) -> TypeGuard[Communicating]:
    """Return whether a layer's pass is a generator that yields collectives."""
    return layer.communicates(training=training, joint=joint)


def _calls(node: Node, steps: Steps) -> Generator[CollectiveCall, Pending, Any]:
    """Run a layer's pass; yield each collective together with the node."""
    pending: Any = None
    while True:
        try:
            call = steps.send(pending)
        except StopIteration as end:
            return end.value
        pending = yield node, call


def run_together(
    loops: Sequence[Loop],
    communicate: Communicate | None,
    before: Callable[[int], None] | None = None,
) -> list[Any]:
    """Run generators in turn to their next collective, then send each the operation, and repeat.

    Parameters
    ----------
    loops : sequence of Loop
        All yield the same collectives.
    communicate : Communicate or None
        Starts a collective of all generators. None: there are no ranks to communicate with.
    before : callable, optional
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
        calls: list[CollectiveCall] = []
        for position, (loop, pending) in enumerate(zip(loops, send, strict=True)):
            if before:
                before(position)
            try:
                calls.append(loop.send(pending))
            except StopIteration as end:
                results[position] = end.value
        if not calls:
            return results
        if communicate is None:
            raise ValueError(
                f"{calls[0][0].name}: this layer exchanges arrays with other ranks; construct the "
                "model with mesh=Mesh(comm, ...)"
            )
        send = communicate(calls)
        del calls


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


def _checked(node: Node, samples: int, result: Any, context: StepContext) -> tuple[Value, Saved]:
    """Return the result of a layer's forward, if it agrees with that of `build`."""
    kind = type(node.layer).__name__
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"{node.name}: forward of {kind} must return a pair (output, saved), got "
            f"{type(result).__name__}; saved may be None"
        )
    shape = getattr(result[0], "shape", None)
    expected = node.inputs[0].shape if context.cut_outputs and _may_remain_cut(node) else node.shape
    if shape is None or shape[1:] != expected or shape[0] != samples:
        given = type(result[0]).__name__ if shape is None else f"shape {tuple(shape)}"
        raise ValueError(
            f"{node.name}: forward of {kind} must return {samples} outputs of shape {node.shape}, "
            f"as returned by build, got {given}"
        )
    return result


def _may_remain_cut(node: Node) -> bool:
    return isinstance(node.layer, Exchange) and node.layer.optional


def _finishes(node: Node, sums: _Gradients) -> bool:
    """Return whether a layer adds its contribution to the others' in its own kernel."""
    layer = node.layer
    return isinstance(layer, Finisher) and layer.finishes and sums.own(node.inputs[0])


def _deliver(graph: Graph, node: Node, dxs: tuple[Array, ...], sums: _Gradients) -> None:
    for position, (source, dx) in enumerate(zip(node.inputs, dxs, strict=True)):
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
                    source.layer.takes_deferred
                    and len(source.consumers) == 1
                    and source not in graph.outputs  # whose gradient has another term
                )
            )
            pitched = position in node.pitched
            dx = dx if passes or pitched else _in_model_dtype(graph, node.layer.array(dx))
            sums.add(source, dx, new=node.layer.new_gradient and not pitched)


def _in_model_dtype(graph: Graph, array: Value) -> Value:
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


class _Gradients:
    """The gradient of each node's output, summed over the contributions of its consumers."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.arrays: dict[int, tuple[Any, bool]] = {}

    def add(self, node: Node, dx: Array, *, new: bool) -> None:
        """Add `dx`; if it is `new`, its memory may be overwritten."""
        if node.index in self.arrays:
            so_far, own = self.arrays[node.index]
            out = so_far if own else dx if new else self.backend.empty(dx.shape, dx.dtype)
            self.backend.elementwise.add(so_far, dx, out=out)
            dx, new = out, True
        self.arrays[node.index] = dx, new

    def own(self, node: Node) -> bool:
        """Return whether the sum so far, if any, may be overwritten."""
        return self.arrays.get(node.index, (None, True))[1]

    def take(self, node: Node) -> Array | Deferred:
        """Return and remove the sum; None if there is none."""
        return self.arrays.pop(node.index, (None, False))[0]
