"""The graph of an ONNX file: nodes, constants, inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pydtnn.layers.base import Shape
from pydtnn.utils.optional import import_optional

OLDEST = 7
"""First opset whose operators are read."""

DOMAINS = ("", "ai.onnx")
"""Names of the operators of ONNX itself."""


@dataclass(frozen=True, eq=False)
class Node:
    """An operator of a graph.

    Attributes
    ----------
    name : str
        Unique, for a layer: parts are separated by dots.
    operator : str
        With the domain, if it is not an operator of ONNX itself.
    inputs, outputs : tuple of str
        Names of values; omitted ones are empty.
    attributes : dict
    constants : dict of str to ndarray
        Those of the graph, by name.
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    constants: dict[str, np.ndarray] = field(repr=False)

    @property
    def variables(self) -> list[str]:
        """Inputs that are not constants."""
        return [name for name in self.inputs if name and name not in self.constants]

    def constant(self, place: int) -> np.ndarray | None:
        """Return the constant that is an input; None if the input is omitted.

        Raises
        ------
        ValueError
            If it is computed.
        """
        name = self.inputs[place] if place < len(self.inputs) else ""
        if not name:
            return None
        if name not in self.constants:
            raise self.fail(f"input {place} must be a constant, got {name}, which is computed")
        return self.constants[name]

    def required(self, place: int) -> np.ndarray:
        """Return the constant that is an input; ValueError if it is omitted or computed."""
        value = self.constant(place)
        if value is None:
            raise self.fail(f"input {place} must be a constant, got none")
        return value

    def get(self, attribute: str, default: Any) -> Any:
        """Return an attribute; numbers of float32 as the shortest decimals."""
        value = self.attributes.get(attribute, default)
        if isinstance(value, float):
            return float(str(np.float32(value)))
        return value.decode() if isinstance(value, bytes) else value

    def fail(self, problem: str) -> ValueError:
        """Return an error that names the node and its operator."""
        return ValueError(f"node {self.name}, operator {self.operator}: {problem}")


@dataclass(frozen=True, eq=False)
class NodeGraph:
    """Nodes in the order of execution.

    Attributes
    ----------
    inputs : dict of str to tuple of int
        Shapes of samples here: images are (H, W, C).
    outputs : list of str
    nodes : list of Node
    opset : int
    """

    inputs: dict[str, Shape]
    outputs: list[str]
    nodes: list[Node]
    opset: int

    def follower(self, node: Node, *operators: str) -> Node | None:
        """Return the only node that reads the output of another, if it has one of the operators."""
        (output, *_) = node.outputs
        readers = [other for other in self.nodes if output in other.inputs]
        if output in self.outputs or len(readers) != 1 or readers[0].operator not in operators:
            return None
        return readers[0]


def parse(who: str, data: bytes) -> NodeGraph:
    """Return the graph of the content of a file.

    Raises
    ------
    ImportError
        If onnx is not installed.
    ValueError
        If it is not an ONNX file, is damaged, has arrays in other files, or an input of unknown
        size.
    """
    onnx = import_optional("onnx", "onnx", who)
    helper, numpy = onnx.helper, import_optional("onnx.numpy_helper", "onnx", who)
    try:
        message = onnx.load_model_from_string(data)
        onnx.checker.check_model(message)
    except Exception as error:  # of any type: the content is that of a file
        reason = " ".join(str(error).split())[:80]
        raise ValueError(f"not an ONNX file, or damaged ({reason})") from error
    opset = max((o.version for o in message.opset_import if o.domain in DOMAINS), default=0)
    if opset < OLDEST:
        raise ValueError(f"expected operators of opset {OLDEST} or later, got opset {opset}")
    graph = message.graph
    constants: dict[str, np.ndarray] = {}
    for tensor in graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ValueError(
                f"expected arrays within the file, got {tensor.name} in another one; save it with "
                "save_as_external_data=False"
            )
        constants[tensor.name] = numpy.to_array(tensor)
    nodes: list[Node] = []
    names: set[str] = set()
    for proto in graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
        if proto.op_type == "Constant" and "value" in attributes:
            constants[proto.output[0]] = numpy.to_array(attributes["value"])
            continue
        operator = proto.op_type if proto.domain in DOMAINS else f"{proto.domain}.{proto.op_type}"
        name = _free(proto.name.replace("/", ".").strip(".") or operator.lower(), names)
        values = tuple(proto.input), tuple(proto.output)
        nodes.append(Node(name, operator, *values, attributes, constants))
    inputs = {value.name: value for value in graph.input if value.name not in constants}
    return NodeGraph(
        {name: _shape(name, value) for name, value in inputs.items()},
        [value.name for value in graph.output],
        nodes,
        opset,
    )


def _free(name: str, names: set[str]) -> str:
    """Add a name, with a number if it exists, to the names; return it."""
    others = (f"{name}_{i}" for i in range(1, len(names) + 1))
    free = next(other for other in (name, *others) if other not in names)
    names.add(free)
    return free


def _shape(name: str, value: Any) -> Shape:
    """Return the shape of a sample of an input here."""
    sizes: Iterable[Any] = value.type.tensor_type.shape.dim
    _, *sample = [size.dim_value for size in sizes] or [0]
    if len(sample) not in (1, 3) or min(sample) < 1:
        given = [size.dim_value or size.dim_param or "?" for size in sizes]
        raise ValueError(
            f"input {name} must be of shape (N, C, H, W) or (N, C) with fixed C, H and W, got "
            f"{tuple(given)}; export the network with samples of a fixed size"
        )
    return (*sample[1:], sample[0])
