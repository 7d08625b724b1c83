"""The graph of an ONNX file: nodes, constants, inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.layers.base import Shape
from pydtnn.utils.files import open_file, path_inside, read_file
from pydtnn.utils.imports import import_optional

MIN_OPSET = 11
"""First opset whose operators are read."""

DOMAINS = ("", "ai.onnx")
"""Names of the operators of ONNX itself."""

MAX_ELEMENTS = 2**28
"""Elements of an array of one sample, or of a computed constant: 1 GiB of float32."""

MAX_BATCH = 64
"""Largest batch of a file whose batches have a fixed size."""


MAX_EXTERNAL_B = 2**31 - 1
"""B of the arrays in other files, which have to fit a message of protocol buffers."""

ANY_BATCH = 1_000_000_007
"""Size of a batch that may have any size, in computations of shapes: a prime, so that sizes of axes
that contain the batch are recognised."""


@dataclass(frozen=True, eq=False)
class OnnxNode:
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
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def get(self, attribute: str, default: Any) -> Any:
        """Return an attribute; numbers of float32 as the shortest decimals."""
        value = self.attributes.get(attribute, default)
        if isinstance(value, float):
            short = np.float32(value)
            return float(str(short)) if float(short) == value else value
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def fail(self, problem: str) -> ValueError:
        """Return an error that names the node and its operator."""
        where = f"node {self.name:.100}, operator {self.operator:.100}"
        problem = re.sub(r"\d{10,18}", _in_batches, problem)
        return ValueError(f"{where}: {problem:.600}")


@dataclass(frozen=True, eq=False)
class OnnxInput:
    """An input of a graph.

    Attributes
    ----------
    sizes : tuple of int
        Of all axes but that of the batch, in the order of ONNX.
    batch : int
        Samples of a batch, 0 if any number.
    integer : bool
        Whether elements are integers, such as tokens.
    axis : int
        Of the batch: 1 in sequences ``(T, N, C)`` and states ``(D, N, H)`` of recurrent layers.
    """

    sizes: tuple[int, ...]
    batch: int
    integer: bool
    axis: int = 0

    @property
    def shape(self) -> Shape:
        """Shape of a sample here: images are (H, W, C)."""
        first, *others = self.sizes
        return (*others, first) if len(others) > 1 else self.sizes


@dataclass(frozen=True, eq=False)
class NodeGraph:
    """Nodes that contribute to outputs, in the order of execution.

    Attributes
    ----------
    inputs : dict of str to Input
    outputs : list of str
    nodes : list of Node
    constants : dict of str to ndarray
    opset : int
    shared : frozenset of str
        Constants of which layers that have the same options are one layer.
    readers : dict of str to list of Node
        The nodes that read a value.
    """

    inputs: dict[str, OnnxInput]
    outputs: list[str]
    nodes: list[OnnxNode]
    constants: dict[str, np.ndarray]
    opset: int
    shared: frozenset[str] = frozenset()
    readers: dict[str, list[OnnxNode]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        readers: dict[str, list[OnnxNode]] = {}
        for node in self.nodes:
            for name in {*node.inputs}:
                readers.setdefault(name, []).append(node)
        object.__setattr__(self, "readers", readers)

    def follower(self, node: OnnxNode, *operators: str) -> OnnxNode | None:
        """Return the only node that reads the output of another, if it has one of the operators."""
        (output, *_) = node.outputs
        readers = self.readers.get(output, [])
        if output in self.outputs or len(readers) != 1 or readers[0].operator not in operators:
            return None
        return readers[0]


def _in_batches(found: re.Match[str]) -> str:
    times, rest = divmod(int(found[0]), ANY_BATCH)
    return found[0] if rest else f"{times} N".removeprefix("1 ")


def read_message(who: str, path: str | Path) -> Any:
    """Return the content of a file, with the arrays that are in other files of its folder.

    Raises
    ------
    ImportError
        If onnx is not installed.
    OSError
        If there is no such file, or no such file with arrays, or it cannot be read.
    ValueError
        If it is not an ONNX file, or is damaged, or names files that are not in its folder.
    """
    onnx, data = import_optional("onnx", "onnx", who), read_file(who, path)
    try:
        message = onnx.load_model_from_string(data)
    except Exception as error:  # of any type: the content is that of a file
        raise _damaged(error) from error
    left = MAX_EXTERNAL_B
    for tensor in _tensors(message.graph):  # before anything else reads the file's arrays
        if tensor.data_location != onnx.TensorProto.EXTERNAL and not tensor.external_data:
            continue
        where, given = f"array {tensor.name:.100}", {e.key: e.value for e in tensor.external_data}
        source = path_inside(where, Path(path).parent, given.get("location"))
        with open_file(where, source) as file:
            size = file.seek(0, 2)
            try:
                start = file.seek(int(given.get("offset", 0)))
                length = min(int(given.get("length", size)), max(size - start, 0))
            except (OSError, ValueError) as error:
                raise _damaged(error) from error
            left -= length
            if length < 0 or left < 0:
                raise ValueError(f"{where}: arrays in other files must have less than 2 GiB")
            tensor.raw_data = file.read(length)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return message


def parse(who: str, message: Any) -> NodeGraph:
    """Return the graph of the content of a file, see `read_message`.

    Raises
    ------
    ValueError
        If it is damaged, has functions or graphs within nodes, or an input of unknown size.
    """
    onnx = import_optional("onnx", "onnx", who)
    helper, numpy = onnx.helper, import_optional("onnx.numpy_helper", "onnx", who)
    if message.functions or message.graph.sparse_initializer:
        raise ValueError(
            "expected a graph of operators and dense arrays, got functions or sparse arrays; "
            "export the network without them"
        )
    graph, constants = message.graph, {}
    for value in (*graph.input, *graph.output):  # may omit it, but not for the checker
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(message)
        for tensor in graph.initializer:
            constants[tensor.name] = numpy.to_array(tensor)
        nodes: list[OnnxNode] = []
        names = Names(proto.name for proto in graph.node)
        for proto in graph.node:
            attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute}
            if proto.op_type == "Constant" and proto.domain in DOMAINS:
                constants[proto.output[0]] = _constant(numpy, attributes)
                continue
            known = proto.domain in DOMAINS
            operator = proto.op_type if known else f"{proto.domain}.{proto.op_type}"
            wanted = proto.name.replace("/", ".").strip(".") or operator.lower()
            values = tuple(proto.input), tuple(proto.output)
            nodes.append(OnnxNode(names.free(wanted), operator, *values, attributes))
    except Exception as error:  # of any type: the content is that of a file
        raise _damaged(error) from error
    opset = max((o.version for o in message.opset_import if o.domain in DOMAINS), default=0)
    if opset < MIN_OPSET:
        raise ValueError(f"expected operators of opset {MIN_OPSET} or later, got opset {opset}")
    recurrent = [node for node in nodes if node.operator in ("GRU", "LSTM")]
    turned = {name for n in recurrent for name in n.inputs[:1] + n.inputs[5:7]}
    computed = [v for v in graph.input if v.name not in constants]
    inputs = {v.name: _input(helper, v, int(v.name in turned)) for v in computed}
    if len({entry.batch for entry in inputs.values()}) > 1:
        given = " and ".join(f"{entry.batch or 'any'}" for entry in inputs.values())
        raise ValueError(f"inputs must have batches of one size, got {given}")
    outputs = [value.name for value in graph.output]
    if not inputs or not outputs:
        raise ValueError("expected a graph with inputs and outputs, got one without")
    return NodeGraph(inputs, outputs, contributing_nodes(nodes, outputs), constants, opset)


def _damaged(error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:80]
    return ValueError(f"not an ONNX file, or damaged ({type(error).__name__}: {reason})")


def _tensors(graph: Any) -> Iterator[Any]:
    """Return all arrays of a graph, with those within attributes."""
    graphs = [graph]
    while graphs:
        graph = graphs.pop()
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for node in graph.node:
            for attribute in node.attribute:
                graphs += [attribute.g, *attribute.graphs]
                yield from (attribute.t, *attribute.tensors)
                for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    yield from (sparse.values, sparse.indices)


def _constant(numpy: Any, attributes: Mapping[str, Any]) -> np.ndarray:
    """Return the value of a node Constant."""
    (name, value), *_ = attributes.items()
    if name == "value":
        return numpy.to_array(value)
    kinds = {"value_float": "f4", "value_floats": "f4", "value_int": "i8", "value_ints": "i8"}
    return np.array(value, kinds[name])  # KeyError: a string or a sparse array


def contributing_nodes(nodes: list[OnnxNode], outputs: Iterable[str]) -> list[OnnxNode]:
    """Return the nodes that contribute to the outputs."""
    wanted, needed = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(filter(None, node.outputs)):
            wanted.update(node.inputs)
            needed.append(node)
    return needed[::-1]


class Names:
    """Names that are given once.

    Parameters
    ----------
    reserved : iterable of str
        Names that others do not get with a number.
    used : iterable of str
        Names that have been given.
    """

    def __init__(self, reserved: Iterable[str], used: Iterable[str] = ()) -> None:
        self._reserved, self._used = {*reserved}, dict.fromkeys(used, 0)

    def free(self, name: str) -> str:
        """Return a name, with a number if it has been given."""
        free = name
        while free in self._used or (free != name and free in self._reserved):
            self._used[name] += 1
            free = f"{name}_{self._used[name]}"
        self._used[free] = 0
        return free


def _input(helper: Any, value: Any, axis: int) -> OnnxInput:
    """Return an input of a graph, with the axis of its batch."""
    kind = value.type.tensor_type.elem_type
    kinds = {helper.np_dtype_to_tensor_dtype(np.dtype(name)): name for name in TYPES}
    if kind not in kinds:
        raise ValueError(
            f"input {value.name} must have elements of type {', '.join(TYPES)}, got the type "
            f"{kind} of ONNX"
        )
    sizes = list(value.type.tensor_type.shape.dim)
    sample = [size.dim_value for size in sizes] or [0]
    batch = sample.pop(axis if len(sample) == 3 else 0)
    if len(sample) not in (1, 2, 3, 4) or min(sample) < 1 or not 0 <= batch <= MAX_BATCH:
        given = [size.dim_value or size.dim_param or "?" for size in sizes]
        raise ValueError(
            f"input {value.name} must be of shape (N, C, H, W), (N, C, D, H, W), (N, T, C) or "
            f"(N, C) with fixed sizes, and N any number or at most {MAX_BATCH}, got "
            f"{tuple(given)}; export the network with samples of a fixed size"
        )
    if prod(sample) > MAX_ELEMENTS:
        raise ValueError(
            f"input {value.name} must have samples of at most {MAX_ELEMENTS} elements, got "
            f"{tuple(sample)}"
        )
    return OnnxInput(tuple(sample), batch, np.dtype(kinds[kind]).kind == "i", axis)


TYPES = ("float16", "float32", "float64", "int32", "int64")
"""Of the elements of an input."""


Array = np.ndarray

MAX_FOLDED_ELEMENTS = 2**24
"""Elements of a result that is larger than its inputs."""

JOINS = {
    *("Add", "Div", "Mod", "Mul", "Pow", "Sub"),
    *("Equal", "Greater", "LessOrEqual"),
    *("Clip", "Max", "Min", "Where"),
}
"""Operators of several arrays, whose results have the shape to which these are broadcast."""

FUNCTIONS = {"HardSigmoid", "Neg", "Reciprocal", "Sigmoid", "Softplus", "Sqrt", "Tanh"}
"""Operators that compute each element."""

FOLDS = {
    *JOINS,
    *FUNCTIONS,
    *("Cast", "ConstantOfShape", "Identity", "Range", "Shape", "Trilu"),
    *("Concat", "Expand", "Gather", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"),
}
"""Operators that are computed if all inputs are constants."""


def fold(node: OnnxNode, inputs: Sequence[Array | None], opset: int) -> Array:
    """Return what a node of `FOLDS` computes from constants.

    Raises
    ------
    ValueError
        If the inputs do not suit the operator, or the result would be too large.
    """
    from onnx import helper  # installed: it has parsed the file
    from onnx.reference import ReferenceEvaluator

    try:
        shape = _shape_of(node, inputs)
        if prod(max(int(n), 0) for n in shape) > MAX_FOLDED_ELEMENTS:
            raise ValueError(f"expected at most {MAX_FOLDED_ELEMENTS} elements, got {shape}")
        given = {str(i): x for i, x in enumerate(inputs) if x is not None}
        names = ["" if x is None else str(i) for i, x in enumerate(inputs)]
        made = helper.make_node(node.operator, names, ["y"], **node.attributes)
        values = [helper.make_empty_tensor_value_info(name) for name in (*given, "y")]
        graph = helper.make_graph([made], "", values[:-1], values[-1:])
        with np.errstate(all="ignore"):
            evaluator: Any = ReferenceEvaluator(graph, opsets={"": opset})
            y = np.asarray(evaluator.run(None, given)[0])
        x = inputs[0] if node.operator == "Cast" and y.dtype.kind == "f" else None
        if x is not None and x.dtype.kind == "i" and (x[x % ANY_BATCH == 0] != 0).any():
            raise ValueError("batches of any size have no number of samples to compute with")
        return y
    except Exception as error:  # of any type: the content is that of a file
        reason = " ".join(str(error).split())[:80]
        raise node.fail(f"the inputs do not suit the operator ({reason})") from error


def _shape_of(node: OnnxNode, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Return a shape of as many elements as a result that is larger than its inputs.

    Raises
    ------
    ValueError
        If it divides by 0.
    """
    first, *others = inputs
    if node.operator in JOINS:
        if node.operator in ("Div", "Mod") and first.dtype.kind in "iu" and not others[0].all():
            raise ValueError("division by 0")
        return np.broadcast_shapes(*(x.shape for x in inputs if x is not None))
    if node.operator == "Concat":
        return (sum(x.size for x in inputs),)
    if node.operator == "ConstantOfShape":
        return tuple(first.tolist())
    if node.operator == "Expand":
        return np.broadcast_shapes(first.shape, tuple(others[0].tolist()))
    if node.operator == "Gather":
        return first.size // max(first.shape[node.get("axis", 0)], 1), others[0].size
    if node.operator == "Range":
        stop, step = (part.reshape(()).item() for part in others)
        return (-int(-(stop - first.reshape(()).item()) // step),)
    return ()


def axes_of(node: OnnxNode, inputs: Sequence[Any]) -> list[int] | None:
    """Return the axes of an operator that has them as an attribute, or since opset 13 as input."""
    given = node.get("axes", None)
    if given is None and len(inputs) > 1 and inputs[1] is not None:
        return [int(axis) for axis in np.asarray(inputs[1]).reshape(-1)]
    return None if given is None else list(given)


def slices_of(node: OnnxNode, inputs: Sequence[Any]) -> tuple[list[int], ...]:
    """Return axes, starts, ends and steps of a node Slice; `inputs` are those after the data."""
    starts, ends = (np.asarray(part).reshape(-1).tolist() for part in inputs[:2])
    given = [None if p is None else p.reshape(-1).tolist() for p in (*inputs[2:], None, None)]
    axes, steps = given[0] or [*range(len(starts))], given[1] or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise node.fail(f"starts, ends, axes and steps must be equally many, got {axes}")
    return axes, starts, ends, steps
