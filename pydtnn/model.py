"""A network on a device: parameters in flat arrays, one forward loop and one backward loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pydtnn.fusion import fuse as fuse_graph
from pydtnn.graph import Graph, Node
from pydtnn.kernels import Backend, Deferred, create_backend, recycled
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Finisher, Layer, Saved, Shape, StepContext
from pydtnn.layers.blocks import Net, nodes
from pydtnn.limits import whole
from pydtnn.parameters import DEFAULT_BUCKET_BYTES, Bucket, Parameter, ParameterBuffer
from pydtnn.statistics import RunningStatistics

DTYPES = ("float32", "float64")


class Model:
    """A network built for an input shape, a backend and a dtype.

    Parameters
    ----------
    net : Layer or Block
        Usually a `Sequential`.
    input_shape : tuple of int, or tuple of such tuples
        Shape of one sample, ``(H, W, C)`` for images; one shape per input if there are several.
    backend : Backend or str
    dtype : str
        "float32" or "float64".
    seed : int
        Of the initial weights: they are a function of the seed and each parameter's name.
    bucket_bytes : int
        Size of the messages in which gradients are exchanged.
    input_gradient : bool
        Whether `backward` computes the gradient of the model's inputs too.
    fuse : bool
        Whether convolutions do the work of batch norms, additions and ReLUs around them
        (`pydtnn.fusion`); results are equal within rounding.

    Attributes
    ----------
    graph : Graph
    parameters : dict of str to Parameter
    buffers : tuple of ParameterBuffer
        The flat arrays, one set per reduction group.
    buckets : tuple of Bucket
        In the order in which backward completes them.
    statistics : RunningStatistics
    """

    def __init__(
        self,
        net: Net,
        input_shape: Shape | Sequence[Shape],
        *,
        backend: Backend | str = "cpu",
        dtype: str = "float32",
        seed: int = 0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        input_gradient: bool = False,
        fuse: bool = True,
    ) -> None:
        if str(dtype) not in DTYPES:
            raise ValueError(f"Model: dtype must be one of {', '.join(DTYPES)}, not {dtype}")
        self.backend = create_backend(backend) if isinstance(backend, str) else backend
        self.dtype = np.dtype(dtype)
        self.seed = seed
        self.input_shapes = _shapes(input_shape)
        self.graph = Graph(self.input_shapes, backend=self.backend, dtype=dtype)
        outputs = nodes(self.graph.add(net, *self.graph.inputs))
        if fuse:
            outputs = fuse_graph(self.graph, outputs)
        self.graph.finish(outputs, input_gradient=input_gradient)
        self._place_parameters(bucket_bytes)
        self.backend.trim()  # what initial values needed on the way
        self.statistics = RunningStatistics([s for layer in self.layers for s in layer.statistics])

    @recycled
    def _place_parameters(self, bucket_bytes: int) -> None:
        ready = [(p, n.index) for n in reversed(self.graph.nodes) for p in n.layer.parameters]
        buffers: list[ParameterBuffer] = []
        for group in dict.fromkeys(p.group for p, _ in ready):
            members = [(p, node) for p, node in ready if p.group == group]
            first = sum(len(b.buckets) for b in buffers)
            buffers.append(
                ParameterBuffer(
                    members,
                    backend=self.backend,
                    dtype=self.dtype.name,
                    bucket_bytes=bucket_bytes,
                    first_index=first,
                )
            )
        self.buffers = tuple(buffers)
        self.parameters: dict[str, Parameter] = {p.name: p for p, _ in ready}
        buckets = (bucket for buffer in buffers for bucket in buffer.buckets)
        self.buckets: tuple[Bucket, ...] = tuple(sorted(buckets, key=lambda b: -b.ready_at))
        for p in self.parameters.values():
            p.value[...] = self.backend.asarray(p.initial_value(self.seed), self.dtype)

    @property
    def layers(self) -> list[Layer]:
        """The layers in the order they run."""
        return [node.layer for node in self.graph.nodes[len(self.input_shapes) :]]

    @property
    def output_shape(self) -> Shape:
        """Shape of the (first) output of one sample."""
        return self.graph.outputs[0].shape

    @recycled
    def forward(
        self,
        x: Array | tuple[Array, ...],
        context: StepContext,
        *,
        keep: bool = True,
        after_node: Callable[[Node, Array], None] | None = None,
    ) -> tuple[Any, list[Saved]]:
        """Run every node in order.

        Parameters
        ----------
        x : Array, shape (N, *input_shape), or one per input
        context : StepContext
        keep : bool
            Whether to keep what backward needs; without, every array is freed after its last use.
        after_node : callable, optional
            Called with each node and its output.

        Returns
        -------
        y : Array, shape (N, *output_shape), or a tuple of arrays if the model has several outputs
        residuals : list
            What `backward` needs.
        """
        inputs = x if isinstance(x, tuple) else (x,)
        graph = self.graph
        context = replace(context, differentiable=keep)
        values: list[Array | Deferred] = [*inputs, *[None] * (len(graph.nodes) - len(inputs))]
        residuals: list[Saved] = [None] * len(graph.nodes)
        for node in graph.nodes[len(inputs) :]:
            xs = [values[i.index] for i in node.inputs]
            if not node.layer.takes_deferred:
                xs = [node.layer.array(x) for x in xs]
            y, saved = node.layer.forward(*xs, context=context)
            values[node.index] = self._regular(y)
            if keep and node.index in graph.trained:
                residuals[node.index] = saved
            del xs, y, saved
            for index in node.releases:
                values[index] = None
            if after_node:
                after_node(node, node.layer.array(values[node.index]))
        outputs = tuple(node.layer.array(values[node.index]) for node in graph.outputs)
        return (outputs if len(outputs) > 1 else outputs[0]), residuals

    @recycled
    def backward(
        self,
        dy: Array | tuple[Array, ...],
        residuals: list[Saved],
        *,
        on_ready: Callable[[Bucket], None] | None = None,
        after_node: Callable[[Node], None] | None = None,
        accumulate: bool = False,
    ) -> Any:
        """Run every node's backward in reverse; gradients land in the flat arrays.

        Parameters
        ----------
        dy : Array, or one per output
            Gradient of the loss with respect to the output.
        residuals : list
            As `forward` returned it; emptied on the way, so that memory is freed as soon as it can
            be.
        on_ready : callable, optional
            Called with each bucket as soon as its gradients are complete.
        after_node : callable, optional
            Called after each node, to let messages make progress.
        accumulate : bool
            Add to the gradients that are there instead of overwriting them.

        Returns
        -------
        dx : Array, or one per input
            Gradient of the inputs if the model was built with ``input_gradient=True``, otherwise
            None.
        """
        for buffer in self.buffers:
            buffer.accumulate = accumulate
        sums = _Gradients(self.backend)
        for node, g in zip(self.graph.outputs, dy if isinstance(dy, tuple) else (dy,), strict=True):
            sums.add(node, g, new=False)
        del dy
        pending = iter(self.buckets)
        bucket = next(pending, None)
        for node in self.graph.nodes[: len(self.input_shapes) - 1 : -1]:
            g = sums.take(node)
            if node.index in self.graph.trained:
                dxs = self._backward(node, g, residuals[node.index], sums)
                if node.layer.needs_dx:
                    self._deliver(node, dxs if isinstance(dxs, tuple) else (dxs,), sums)
                del dxs
            del g
            residuals[node.index] = None
            while bucket and bucket.ready_at == node.index:
                if on_ready:
                    on_ready(bucket)
                bucket = next(pending, None)
            if after_node:
                after_node(node)
        dx = tuple(sums.take(node) for node in self.graph.inputs)
        return dx if len(dx) > 1 else dx[0]

    @staticmethod
    def _backward(node: Node, dy: Array | Deferred, saved: Saved, sums: _Gradients) -> Any:
        layer = node.layer
        if isinstance(layer, Finisher) and layer.finishes and sums.own(node.inputs[0]):
            return layer.finish_backward(dy, saved, sums.take(node.inputs[0]))
        return layer.backward(dy, saved)

    def _deliver(self, node: Node, dxs: tuple[Array, ...], sums: _Gradients) -> None:
        for source, dx in zip(node.inputs, dxs, strict=True):
            if source.index in self.graph.trained:
                if dx is None or dx.shape[1:] != source.shape:
                    given = "None" if dx is None else f"shape {dx.shape}"
                    raise ValueError(
                        f"{node.name}: backward of {type(node.layer).__name__} must return a "
                        f"gradient of shape {source.shape} besides the batch, not {given}"
                    )
                passes = isinstance(dx, Deferred) and (
                    dx.array is not None  # the whole gradient, from `finish_backward`
                    or (source.layer.takes_deferred and len(source.consumers) == 1)
                )
                dx = dx if passes else self._regular(node.layer.array(dx))
                sums.add(source, dx, new=node.layer.new_gradient)

    def _regular(self, array: Array | Deferred) -> Array | Deferred:
        if isinstance(array, Deferred):
            return array
        # Kernels count on C order and the model's dtype; a layer of a user's own may well return a
        # transposed view.
        return self.backend.asarray(array, self.dtype)

    def predict(self, x: np.ndarray | tuple[np.ndarray, ...], *, batch_size: int = 256) -> Any:
        """Run the network on samples, without dropout and with running statistics.

        Parameters
        ----------
        x : ndarray, shape (n, *input_shape), or a tuple of one per input
            Already normalised as in training; cast to the model's dtype.
        batch_size : int
            Samples per pass.

        Returns
        -------
        ndarray, shape (n, *output_shape), or a tuple of arrays if the model has several outputs

        Raises
        ------
        ValueError
            If `x` is not of the model's input shape.
        """
        whole("Model.predict", "batch_size", batch_size, at_least=1)
        inputs = x if isinstance(x, tuple) else (x,)
        given = tuple(np.shape(a)[1:] for a in inputs)
        if given != self.input_shapes or len({len(a) for a in inputs}) != 1:
            expected = " and ".join(map(str, self.input_shapes))
            shapes = " and ".join(str(np.shape(a)) for a in inputs)
            raise ValueError(
                f"Model.predict: expected an array of samples of shape {expected}, got {shapes}"
            )
        context = StepContext(training=False)
        samples = len(inputs[0])
        outputs = [np.empty((samples, *node.shape), self.dtype) for node in self.graph.outputs]
        for start in range(0, samples, batch_size):
            rows = slice(start, start + batch_size)
            batch = tuple(self.backend.asarray(a[rows], self.dtype) for a in inputs)
            y, _ = self.forward(batch, context, keep=False)
            for output, part in zip(outputs, y if isinstance(y, tuple) else (y,), strict=True):
                output[rows] = self.backend.to_numpy(part)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def state(self) -> dict[str, np.ndarray]:
        """Parameters and running statistics by name; on a CPU views, which training changes."""
        values = {name: self.backend.to_numpy(p.value) for name, p in self.parameters.items()}
        return values | self.statistics.state()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Take parameters and running statistics from what `state` returned.

        Raises
        ------
        ValueError
            If names or shapes differ, listing them; nothing is changed then.
        """
        own = self.state()
        check_fit(own, state)
        for name, p in self.parameters.items():
            p.value[...] = self.backend.asarray(state[name], self.dtype)
        for name, array in self.statistics.state().items():
            array[...] = state[name]
        self.statistics.samples = 0.0

    def summary(self, batch: int = 1, *, slots: int = 0) -> str:
        """Describe the model in a table: see `pydtnn.summary.summarize`."""
        from pydtnn.summary import summarize

        return summarize(self, batch, slots=slots)


class _Gradients:
    """The gradient of each node's output, added up as its consumers deliver it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.arrays: dict[int, tuple[Any, bool]] = {}

    def add(self, node: Node, dx: Array, *, new: bool) -> None:
        """Add `dx`; if it is `new`, its memory is ours."""
        if node.index in self.arrays:
            so_far, own = self.arrays[node.index]
            out = so_far if own else dx if new else self.backend.empty(dx.shape, dx.dtype)
            self.backend.elementwise.add(so_far, dx, out=out)
            dx, new = out, True
        self.arrays[node.index] = dx, new

    def own(self, node: Node) -> bool:
        """Whether what was delivered so far, if anything, may be written over."""
        return self.arrays.get(node.index, (None, True))[1]

    def take(self, node: Node) -> Array | Deferred:
        """Hand out the sum and forget it; None if nobody delivered."""
        return self.arrays.pop(node.index, (None, False))[0]


def _shapes(input_shape: Shape | Sequence[Shape]) -> tuple[Shape, ...]:
    if isinstance(input_shape, int | np.integer):
        raise TypeError(
            f"Model: input_shape must be a tuple, not {input_shape}; use ({input_shape},)"
        )
    several = len(input_shape) > 0 and not isinstance(input_shape[0], int | np.integer)
    shapes: Any = input_shape if several else (input_shape,)
    result = tuple(tuple(map(int, shape)) for shape in shapes)
    if not all(n > 0 for shape in result for n in shape):
        raise ValueError(f"Model: input_shape must be positive ints, not {input_shape}")
    return result


def check_fit(own: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]) -> None:
    """Check that two sets of named arrays have the same names and shapes.

    Raises
    ------
    ValueError
        Naming what is missing, what is unknown and which shapes differ.
    """
    problems = [f"{name} is missing" for name in own if name not in given]
    problems += [f"{name} is unknown" for name in given if name not in own]
    problems += [
        f"{name} has shape {given[name].shape} instead of {own[name].shape}"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError(f"weights do not fit the model: {', '.join(problems[:8])}{more}")
