"""Operators of ONNX as layers.

A function returns the steps that compute what a node does. Layers are made when the shapes of their
inputs are known, without the batch axis and with the channels last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from pydtnn import layers
from pydtnn.interchange.onnx.graph import Node, NodeGraph
from pydtnn.layers import Layer
from pydtnn.layers.base import Shape

Make = Callable[[Sequence[Shape]], Layer]


@dataclass(frozen=True, eq=False)
class Step:
    """A layer that replaces one node, or two.

    Attributes
    ----------
    node : Node
        The last one, whose name the layer has.
    make : callable
        Returns the layer for the shapes of its inputs.
    inputs : list of str
        Names of values.
    arrays : dict of str to ndarray
        Parameters and running statistics in ONNX's layout, by PyTorch's names.
    """

    node: Node
    make: Make
    inputs: list[str]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


Read = Callable[[Node, NodeGraph], Step]


def _plain(make: Callable[[Node], Layer]) -> Read:
    """Return a function for an operator whose layer does not depend on shapes."""

    def read(node: Node, graph: NodeGraph) -> Step:
        layer = make(node)
        return Step(node, lambda shapes: layer, node.variables)

    return read


def _conv(node: Node, graph: NodeGraph) -> Step:
    weight, bias = node.required(1), node.constant(2)
    if weight.ndim != 4:
        raise node.fail(f"filters must be (O, C, kh, kw), got {weight.shape}")
    kernel = tuple(weight.shape[2:])
    options = _window(node, kernel)
    dilation = tuple(node.get("dilations", (1, 1)))
    arrays = {"weight": weight} | ({} if bias is None else {"bias": bias})

    def make(shapes: Sequence[Shape]) -> Layer:
        return layers.Conv2d(
            len(weight),
            kernel,
            dilation=dilation,
            groups=node.get("group", 1),
            bias=bias is not None,
            **options,
        )

    return Step(node, make, node.variables, arrays)


def _window(node: Node, kernel: tuple[int, ...]) -> dict[str, Any]:
    """Return stride and padding of a convolution or pooling."""
    stride = tuple(node.get("strides", (1, 1)))
    automatic = node.get("auto_pad", "NOTSET")
    known = {"NOTSET": None, "VALID": "valid", "SAME_UPPER": "same"}
    if len(kernel) != 2 or automatic not in known:
        raise node.fail(
            f"expected images, and auto_pad of {', '.join(known)}, got a kernel of shape {kernel} "
            f"and auto_pad {automatic}"
        )
    pads = node.get("pads", (0, 0, 0, 0))
    pairs = tuple(zip(pads[:2], pads[2:], strict=True))
    return {"stride": stride, "padding": known[automatic] or pairs}


def _pool(kind: type[layers.MaxPool2d] | type[layers.AvgPool2d]) -> Read:
    def read(node: Node, graph: NodeGraph) -> Step:
        kernel = tuple(node.get("kernel_shape", ()))
        options = _window(node, kernel)
        if set(node.get("dilations", (1,))) != {1}:
            raise node.fail(f"dilations must be 1, got {node.attributes['dilations']}")
        if kind is layers.AvgPool2d:
            options["count_padding"] = bool(node.get("count_include_pad", 0))

        def make(shapes: Sequence[Shape]) -> Layer:
            if node.get("ceil_mode", 0) and not _divides(shapes[0], kernel, **options):
                raise node.fail(
                    f"ceil_mode must be 0 if windows do not divide the image, got {shapes[0]}"
                )
            return kind(kernel, **options)

        return Step(node, make, node.variables)

    return read


def _divides(image: Shape, kernel: Shape, stride: Shape, padding: Any, **_: Any) -> bool:
    if isinstance(padding, str):
        return False
    sizes = zip(image, kernel, stride, padding, strict=False)
    return all((n + sum(pair) - k) % s == 0 for n, k, s, pair in sizes)


def _batch_norm(node: Node, graph: NodeGraph) -> Step:
    if node.get("training_mode", 0):
        raise node.fail("expected a network for inference, got training_mode=1; export it again")
    names = ("weight", "bias", "running_mean", "running_var")
    arrays = {name: node.required(place) for place, name in enumerate(names, start=1)}
    momentum = round(1 - node.get("momentum", 0.9), 7)
    layer = layers.BatchNorm(epsilon=node.get("epsilon", 1e-5), momentum=momentum or 0.1)
    return Step(node, lambda shapes: layer, node.variables, arrays)


def _gemm(node: Node, graph: NodeGraph) -> Step:
    if node.get("transA", 0):
        raise node.fail("transA must be 0, got 1")
    weight = node.required(1) * node.required(1).dtype.type(node.get("alpha", 1.0))
    bias = node.constant(2)
    if bias is not None:
        bias = bias * bias.dtype.type(node.get("beta", 1.0))
    return _linear(node, weight if node.get("transB", 0) else weight.T, bias, node.inputs[:1])


def _matmul(node: Node, graph: NodeGraph) -> Step:
    weight, added = node.required(1), graph.follower(node, "Add")
    if added is not None and len(added.variables) == 1:
        (bias,) = [added.constants[name] for name in added.inputs if name in added.constants]
        return _linear(added, weight.T, bias, node.inputs[:1])
    return _linear(node, weight.T, None, node.inputs[:1])


def _linear(node: Node, weight: np.ndarray, bias: np.ndarray | None, inputs: Sequence[str]) -> Step:
    if weight.ndim != 2 or (bias is not None and bias.size not in (1, len(weight))):
        raise node.fail("expected a matrix and a vector with a number for each of its outputs")
    arrays = {"weight": weight}
    if bias is not None:
        arrays["bias"] = np.broadcast_to(bias.reshape(-1), (len(weight),))

    def make(shapes: Sequence[Shape]) -> Layer:
        if len(shapes[0]) != 1:
            raise node.fail(f"inputs must be features (N, C), got samples of shape {shapes[0]}")
        return layers.Linear(len(weight), bias=bias is not None)

    return Step(node, make, list(inputs), arrays)


def _add(node: Node, graph: NodeGraph) -> Step:
    if len(node.variables) != len(node.inputs):
        raise node.fail("inputs must be computed, got a constant that follows no MatMul")
    return Step(node, lambda shapes: layers.Add(), node.variables)


def _concat(node: Node, graph: NodeGraph) -> Step:
    def make(shapes: Sequence[Shape]) -> Layer:
        return layers.Concat(_axis(node, node.get("axis", 1), shapes[0]))

    return Step(node, make, node.variables)


def _axis(node: Node, axis: int, shape: Shape) -> int:
    """Return the axis of a sample here for that of a batch in ONNX."""
    place = axis % (len(shape) + 1) - 1
    if place < 0:
        raise node.fail("the axis must not be that of the batch, got 0")
    return (2, 0, 1)[place] if len(shape) == 3 else place


def _softmax(node: Node, graph: NodeGraph) -> Step:
    axis = node.get("axis", -1 if graph.opset >= 13 else 1)

    def make(shapes: Sequence[Shape]) -> Layer:
        if _axis(node, axis, shapes[0]) != len(shapes[0]) - 1:
            raise node.fail(f"the axis must be that of the channels, got {axis}")
        return layers.Softmax()

    return Step(node, make, node.variables)


def _clip(node: Node) -> Layer:
    bounds = [node.constant(place) for place in (1, 2)]
    low, high = [
        node.get(name, None) if bound is None else float(bound)
        for name, bound in zip(("min", "max"), bounds, strict=True)
    ]
    if low != 0 or high not in (None, 6):
        raise node.fail(f"bounds must be 0 and 6, or 0 alone, got {low} and {high}")
    return layers.ReLU() if high is None else layers.ReLU6()


def _dropout(node: Node) -> Layer:
    rate = node.constant(1)
    if rate is None:
        return layers.Dropout(node.get("ratio", 0.5))
    return layers.Dropout(float(str(rate.reshape(-1)[0])))  # the shortest decimal of a float32


def _global_pool(node: Node, graph: NodeGraph) -> Step:
    """Read the operator, whose output is an image of one pixel, and a Flatten behind it."""
    flattened = graph.follower(node, "Flatten")
    if flattened is not None and flattened.get("axis", 1) == 1:
        return Step(flattened, lambda shapes: layers.GlobalAvgPool2d(), node.variables)
    return Step(node, lambda shapes: layers.AdaptiveAvgPool2d(1), node.variables)


def _flatten(node: Node, graph: NodeGraph) -> Step:
    if node.get("axis", 1) != 1:
        raise node.fail(f"axis must be 1, got {node.get('axis', 1)}")
    return Step(node, lambda shapes: layers.Flatten(), node.variables)


def _reshape(node: Node, graph: NodeGraph) -> Step:
    target = node.required(1).tolist()

    def make(shapes: Sequence[Shape]) -> Layer:
        if len(target) != 2 or target[1] not in (-1, prod(shapes[0])):
            raise node.fail(f"expected a shape (N, features), got {target} for {shapes[0]}")
        return layers.Flatten()

    return Step(node, make, node.variables)


def _pad(node: Node, graph: NodeGraph) -> Step:
    given = node.constant(1) if graph.opset >= 11 else np.array(node.get("pads", ()))
    value = node.constant(2) if graph.opset >= 11 else node.get("value", 0.0)
    if given is None or node.constant(3) is not None or node.get("mode", "constant") != "constant":
        raise node.fail("expected pads of all axes, and mode constant")
    if value is not None and np.any(np.asarray(value)):
        raise node.fail(f"the value must be 0, got {value}")
    pads = given.tolist()

    def make(shapes: Sequence[Shape]) -> Layer:
        axes = len(pads) // 2
        pairs = [(pads[axis], pads[axis + axes]) for axis in range(axes)]
        if axes != len(shapes[0]) + 1 or pairs[0] != (0, 0):
            raise node.fail(f"pads must be those of a batch of {shapes[0]}, got {pads}")
        first, *others = pairs[1:]
        return layers.Pad((*others, first))

    return Step(node, make, node.variables)


def _slice(node: Node, graph: NodeGraph) -> Step:
    starts, ends = node.required(1).tolist(), node.required(2).tolist()
    axes, steps = node.constant(3), node.constant(4)
    places = list(range(len(starts))) if axes is None else axes.tolist()
    strides = [1] * len(starts) if steps is None else steps.tolist()

    def make(shapes: Sequence[Shape]) -> Layer:
        cuts = [slice(None)] * len(shapes[0])
        for axis, cut in zip(places, zip(starts, ends, strides, strict=True), strict=True):
            cuts[_axis(node, axis, shapes[0])] = slice(*cut)
        return layers.Slice(*cuts)

    return Step(node, make, node.variables)


READERS: Mapping[str, Read] = {
    "Add": _add,
    "Atan": _plain(lambda node: layers.ArcTan()),
    "AveragePool": _pool(layers.AvgPool2d),
    "BatchNormalization": _batch_norm,
    "Clip": _plain(_clip),
    "Concat": _concat,
    "Conv": _conv,
    "Dropout": _plain(_dropout),
    "Elu": _plain(lambda node: layers.ELU(node.get("alpha", 1.0))),
    "Flatten": _flatten,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool,
    "Identity": _plain(lambda node: layers.Identity()),
    "LeakyRelu": _plain(lambda node: layers.LeakyReLU(node.get("alpha", 0.01))),
    "Log": _plain(lambda node: layers.Log()),
    "MatMul": _matmul,
    "MaxPool": _pool(layers.MaxPool2d),
    "Pad": _pad,
    "Relu": _plain(lambda node: layers.ReLU()),
    "Reshape": _reshape,
    "Sigmoid": _plain(lambda node: layers.Sigmoid()),
    "Slice": _slice,
    "Softmax": _softmax,
    "Sum": _add,
    "Tanh": _plain(lambda node: layers.Tanh()),
}
"""Functions that read an operator; others cannot be imported."""
