"""Activations that several nodes compute together, as one node.

Exporters write an activation without an operator of its own as arithmetic: SiLU as a Sigmoid and a
Mul, GELU as five nodes around Erf or Tanh. What such nodes compute from one value is compared with
the activations at many points, so that it does not matter in which way it has been written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from pydtnn import layers
from pydtnn.kernels.reference import elementwise
from pydtnn.layers import Layer
from pydtnn.tools.interchange.onnx.graph import (
    FUNCTIONS,
    JOINS,
    NodeGraph,
    OnnxNode,
    contributing_nodes,
    fold,
)

Array = np.ndarray

ACTIVATION = "activation"
"""Operator of a node that computes one of `ACTIVATIONS`, and its attribute with the name."""

ACTIVATIONS: dict[str, Callable[[], Layer]] = {
    "relu": layers.ReLU,
    "relu6": layers.ReLU6,
    "sigmoid": layers.Sigmoid,
    "tanh": layers.Tanh,
    "gelu": layers.GELU,
    "gelu_exact": lambda: layers.GELU("none"),
    "silu": layers.SiLU,
    "hard_swish": layers.HardSwish,
    "hard_sigmoid": layers.HardSigmoid,
    "softplus": layers.Softplus,
}
"""Layers by the names of their kernels."""

LAST = frozenset({"Clip", "Div", "HardSigmoid", "Max", "Min", "Mul", "Where"})
"""Operators of the last node of an activation."""

PARTS = JOINS | FUNCTIONS | {"Erf"}
"""Operators of which activations consist."""

MAX_NODES = 16
"""Of an activation, and values before its last node that are tried as its input."""

TEST_VALUES = np.concatenate(
    [np.linspace(-12, 12, 193), *(sign * np.logspace(-30, 30, 61) for sign in (-1, 1))]
)
"""Where functions are compared."""

RTOL, ATOL = 4e-6, 1e-12
"""Bounds of differences: constants in files are rounded to float32, and differences of large terms,
such as 1 + erf(x) for negative x, are small."""


def with_activations(graph: NodeGraph) -> NodeGraph:
    """Return a graph with one node instead of those that are an activation."""
    made = {name: node for node in graph.nodes for name in node.outputs}
    nodes = [
        _activation(node, made, graph) if node.operator in LAST else node for node in graph.nodes
    ]
    return replace(graph, nodes=contributing_nodes(nodes, graph.outputs))


def _activation(last: OnnxNode, made: Mapping[str, OnnxNode], graph: NodeGraph) -> OnnxNode:
    """Return the activation of a value before a node, from the nearest on, or the node itself."""
    constants = graph.constants
    found = [name for name in last.inputs if name and name not in constants]
    for name in found:
        y = _computed(last.outputs[0], name, made, graph)
        if y is not None and y.shape == TEST_VALUES.shape:
            for i in np.flatnonzero(_equals(y, _expected()))[:1]:
                attributes = {ACTIVATION: [*ACTIVATIONS][i]}
                return replace(last, operator=ACTIVATION, inputs=(name,), attributes=attributes)
        node = made.get(name)
        if node is not None and node.operator in PARTS and len(found) < MAX_NODES:
            found += [n for n in node.inputs if n and n not in constants and n not in found]
    return last


def _computed(name: str, base: str, made: Mapping[str, OnnxNode], graph: NodeGraph) -> Array | None:
    """Return a value if another one is `TEST_VALUES`; None if it depends on further ones."""
    values: dict[str, Array | None] = {base: TEST_VALUES}

    def value(name: str) -> Array | None:
        if name in values:
            return values[name]
        values[name] = None
        constant, node = graph.constants.get(name), made.get(name)
        if constant is not None:
            if constant.size == 1 and constant.ndim < 2 and constant.dtype.kind in "fiu":
                values[name] = constant.reshape(()).astype("float64")
        elif node is not None and node.operator in PARTS and len(values) < 2 * MAX_NODES:
            given = [value(each) if each else None for each in node.inputs]
            if all(y is not None or not each for y, each in zip(given, node.inputs, strict=True)):
                try:
                    erf = node.operator == "Erf"  # of which ONNX itself computes float32 only
                    values[name] = _erf(given[0]) if erf else fold(node, given, graph.opset)
                except ValueError:
                    return None
        return values[name]

    return value(name)


def _erf(x: Any) -> Array:
    return 2 * elementwise.normal(np, x * np.sqrt(2))[0] - 1


def _equals(a: Array, b: Array) -> Array:
    """Return whether values at `TEST_VALUES` are equal, for each row of `b`."""
    with np.errstate(all="ignore"):
        return (abs(a - b) <= RTOL * abs(b) + ATOL * np.minimum(1, abs(TEST_VALUES))).all(-1)


@cache
def _expected() -> Array:
    """Return the values of `ACTIVATIONS` at `TEST_VALUES`, one in a row."""
    with np.errstate(all="ignore"):
        return np.stack(
            [elementwise.FUNCTIONS[name].forward(np, TEST_VALUES, 0.0) for name in ACTIVATIONS]
        )


def decimal(number: float) -> float:
    """Return a number, the shortest decimal of it if it is one of float32."""
    with np.errstate(all="ignore"):
        short = np.float32(number)
    return float(str(short)) if abs(float(short) - number) <= 4e-16 * abs(number) else number
