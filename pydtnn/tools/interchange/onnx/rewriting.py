"""Norms that several nodes compute together, as one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np

from pydtnn.tools.interchange.onnx.graph import NodeGraph, OnnxNode, axes_of, contributing_nodes

Pattern = str | tuple[Any, ...]
"""An operator with patterns of its first inputs, or a name of any value, the same everywhere."""

Match = dict[Any, Any]
"""Values by their names in a pattern, and nodes by operator and output."""

UNIT = "\0one"
"""Name of a constant of 1, as no value in a file has."""

CENTRED = ("Sub", "x", ("ReduceMean", "x"))
VARIANCE = ("ReduceMean", ("Pow", CENTRED, "two"))
NORMED = ("Div", CENTRED, ("Sqrt", ("Add", VARIANCE, "epsilon")))
SQUARES = ("ReduceMean", ("Pow", "x", "two"))
ROOT = ("Mul", "x", ("Reciprocal", ("Sqrt", ("Add", SQUARES, "epsilon"))))
PATTERNS: list[tuple[str, Pattern, Match]] = [
    ("LayerNormalization", ("Add", ("Mul", NORMED, "gamma"), "beta"), {}),
    ("LayerNormalization", NORMED, {"gamma": UNIT, "beta": ""}),
    ("rms_norm", ("Mul", ROOT, "gamma"), {"beta": ""}),
]
"""Norms with and without factors and terms, and names that they do not have."""

GROUPS = ("InstanceNormalization", ("Reshape", "x", "rows"), "gamma", "beta")
GROUP_NORM = ("Add", ("Mul", ("Reshape", GROUPS, "shape"), "scale"), "shift")


def joined(graph: NodeGraph) -> NodeGraph:
    """Return a graph with one node instead of those that are a norm."""
    made = {name: node for node in graph.nodes for name in node.outputs}
    constants = {UNIT: np.ones((), np.float32), **graph.constants}
    nodes = [_joined(node, made, constants) for node in graph.nodes]
    return replace(graph, nodes=contributing_nodes(nodes, graph.outputs), constants=constants)


def _joined(
    node: OnnxNode, made: Mapping[str, OnnxNode], constants: Mapping[str, np.ndarray]
) -> OnnxNode:
    if node.operator not in ("Add", "Div", "Mul"):
        return node
    if found := _unify(made, node.outputs[0], GROUP_NORM, {}):
        (norm,) = (value for key, value in found.items() if key[0] == GROUPS[0])
        names = ("x", "scale", "shift", "gamma", "beta", "rows", "shape")
        made_of = tuple(found[name] for name in names)
        attributes = norm.attributes
        return replace(node, operator="GroupNormalization", inputs=made_of, attributes=attributes)
    for operator, pattern, omitted in PATTERNS:
        found = _unify(made, node.outputs[0], pattern, omitted)
        if found and (options := _of_layer_norm(found, constants)):
            made_of = tuple(found[name] for name in ("x", "gamma", "beta"))
            return replace(node, operator=operator, inputs=made_of, attributes=options)
    return node


def _of_layer_norm(found: Match, constants: Mapping[str, np.ndarray]) -> Mapping[str, Any] | None:
    """Return the attributes of a layer norm; None if it has other inputs than constants."""
    means = [value for key, value in found.items() if key[0] == "ReduceMean"]
    axes = {tuple(axes_of(n, [constants.get(name) for name in n.inputs]) or ()) for n in means}
    names = (found["gamma"], found["beta"] or UNIT, found["two"], found["epsilon"])
    kept = all(n.get("keepdims", 1) for n in means) and len(axes) == 1 and axes != {()}
    if not kept or not all(name in constants for name in names):
        return None
    two, epsilon = (constants[name] for name in names[2:])
    if two.size != 1 or two != 2 or epsilon.size != 1:
        return None
    (own,) = axes
    return {"axis": min(own), "count": len(own), "epsilon": float(epsilon.item())}


def _unify(made: Mapping[str, OnnxNode], name: str, pattern: Pattern, found: Match) -> Match | None:
    """Return what the names in a pattern are, if a value has it, or None."""
    if isinstance(pattern, str):
        return {**found, pattern: name} if found.get(pattern, name) == name else None
    operator, *parts = pattern
    node = made.get(name)
    if node is None or node.operator != operator or len(node.inputs) < len(parts):
        return None
    for inputs in permutations(node.inputs) if operator in ("Add", "Mul") else [node.inputs]:
        result: Match | None = {**found, (operator, name): node}
        for part, given in zip(parts, inputs, strict=False):
            result = None if result is None else _unify(made, given, part, result)
        if result is not None:
            return result
    return None
