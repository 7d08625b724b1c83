"""Networks of ONNX files as models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.layers import Block, Identity
from pydtnn.layers.blocks import GraphBuilder
from pydtnn.layers.node import Node as Part
from pydtnn.layers.node import Outputs
from pydtnn.model import Model
from pydtnn.saving.weights import check_numbers
from pydtnn.tools.interchange.onnx.functions import with_activations
from pydtnn.tools.interchange.onnx.graph import (
    ANY_BATCH,
    FOLDS,
    MAX_ELEMENTS,
    NodeGraph,
    OnnxNode,
    fold,
    parse,
    read_message,
)
from pydtnn.tools.interchange.onnx.reading import Reading, Repeated
from pydtnn.tools.interchange.onnx.rewriting import joined
from pydtnn.tools.interchange.onnx.sequence_readers import (
    PARTS_OF_ATTENTION,
    READERS,
    Scores,
    read_scores,
)
from pydtnn.tools.interchange.onnx.views import Atom, Value, Wiring
from pydtnn.utils.imports import import_optional
from pydtnn.utils.validate import check_bool

WHO = "import_onnx"

RUNTIME = "onnxruntime"
"""Package that computes what an imported model is compared with."""

TOLERANCES = {"float16": 2e-2, "bfloat16": 1e-1}
"""Largest differences from onnxruntime, relative to the largest output, by type of the model."""

TOLERANCE = 1e-3
"""That of float32 and float64: rounding, in any order of sums, of deep networks is below it."""


def import_onnx(
    path: str | Path,
    *,
    backend: Backend | str = "cpu",
    dtype: str = "float32",
    verify: bool = False,
) -> Model:
    """Read a network from an ONNX file, with its weights.

    The model is one of layers of the library: it can be trained, and saved with
    `pydtnn.saving.save_model`. Images are ``(N, H, W, C)`` here and ``(N, C, H, W)`` in the file;
    so are outputs that are images. Outputs that are features have the order of the file. Names of
    layers are those of the nodes. Batches may have any size, also if those of the file have a fixed
    one.

    Parameters
    ----------
    path : str or Path
        Of opset 11 or later; samples must have a fixed size.
    backend : Backend or str
    dtype : str
        See `Model`; numbers are rounded to it if the file has others.
    verify : bool
        Whether to compute the outputs of random samples with onnxruntime, which must be installed,
        and to compare those of the model with them.

    Returns
    -------
    Model

    Raises
    ------
    OSError
        If there is no such file, or it cannot be read.
    ImportError
        If onnx is not installed, or onnxruntime with `verify`.
    ValueError
        If it is damaged, or contains an operator, or an option of one, that no layer has: the
        message contains node and operator. With `verify`, if outputs differ.
    """
    check_bool(WHO, "verify", verify)
    if verify:
        import_optional(RUNTIME, RUNTIME, f"{WHO}: verify=True")
    try:
        message = read_message(WHO, path)
        data = message.SerializeToString() if verify else b""
        graph = with_activations(joined(parse(WHO, message)))
        check_operators(graph)
        model = create_model(graph, backend, dtype)
        if verify:
            _verify(model, graph, data)
    except ValueError as error:
        raise ValueError(f"{WHO}: {path}: {error}") from error
    return model


def create_model(graph: NodeGraph, backend: Backend | str, dtype: str) -> Model:
    """Return the model of a graph; ValueError if its numbers do not fit the type."""
    net = NodeNetwork(graph)
    shapes = [entry.shape for entry in graph.inputs.values()]
    model = Model(net, shapes, backend=backend, dtype=dtype)
    check_numbers(net.arrays, model.dtype)
    if net.arrays:
        model.load(net.arrays)
    return model


def can_verify() -> bool:
    """Return whether onnxruntime is installed."""
    return find_spec(RUNTIME) is not None


class NodeNetwork(Block):
    """The network of an ONNX file; parameters are initialised with zeros, as weights follow.

    Parameters
    ----------
    nodes : NodeGraph

    Attributes
    ----------
    arrays : dict of str to ndarray
        Parameters and running statistics, by their names in the model, once it is wired.
    """

    def __init__(self, nodes: NodeGraph) -> None:
        super().__init__()
        self.nodes = nodes
        self.arrays: dict[str, np.ndarray] = {}

    def wire(self, graph: GraphBuilder, *inputs: Part) -> Outputs:
        """Add the layers with their connections."""
        net = Wiring(graph, inputs, (node.name for node in self.nodes.nodes))
        values = _inputs(net, self.nodes, inputs)
        values.update(self.nodes.constants)
        budget = 4 * sum(c.size for c in self.nodes.constants.values()) + MAX_ELEMENTS
        for node in self.nodes.nodes:
            if node.outputs[0] in values:
                continue  # read together with a node before
            given = [_value(values, name, node.name) if name else None for name in node.inputs]
            net.reads = tuple(name for name in node.inputs if name in self.nodes.shared)
            made = _read(Reading(node, self.nodes, net, given, values))
            if isinstance(made, np.ndarray) and made.base is None:
                budget -= made.size
                if budget < 0:
                    raise node.fail(
                        "constants that nodes compute must not exceed those of the file"
                    )
            several = made if isinstance(made, list) else [made]
            for name, value in zip(node.outputs, several, strict=False):
                if name:
                    values[name] = value
        self.arrays = net.arrays
        outputs = [self._output(net, values, name, inputs) for name in self.nodes.outputs]
        unique = [
            net.add(f"{part.name}.copy", Identity(), part) if part in outputs[:i] else part
            for i, part in enumerate(outputs)
        ]
        return tuple(unique) if len(unique) > 1 else unique[0]

    def _output(
        self, net: Wiring, values: Mapping[str, Any], name: str, inputs: tuple[Part, ...]
    ) -> Part:
        """Return the node of an output: an image with the channels last, others as in the file."""
        x = _value(values, name, "the output")
        if not isinstance(x, Value) or x.integer:
            given = "a product of two computed arrays" if isinstance(x, Scores) else "a constant"
            raise ValueError(f"output {name} must be computed, got {given} or integers")
        try:
            x = Reading(_END, self.nodes, net, [x], {}).value()
            if x.batch_axis in x.axes[:2] and len(x.axes) == 3:  # states (D, N, H)
                place = x.axes.index(x.batch_axis)
                x = x.transposed([place, 1 - place, 2])
            if len(x.axes) > 3:
                part, _ = net.channels_last(x)
            else:
                part = net.plain(x).source.node
        except ValueError as error:
            named = str(error).startswith("node ")
            raise error if named else ValueError(f"output {name}: {error}") from error
        return net.add(f"{name}.copy", Identity(), part) if part in inputs else part


_END = OnnxNode("output", "output", (), (), {})


def _inputs(net: Wiring, graph: NodeGraph, parts: tuple[Part, ...]) -> dict[str, Any]:
    """Return the values of the inputs, by name."""
    size = max((entry.batch for entry in graph.inputs.values()), default=0)
    batch, values = Atom(size or ANY_BATCH), {}
    for (name, entry), part in zip(graph.inputs.items(), parts, strict=True):
        image = net.image(part, batch, name)
        if len(entry.sizes) == 2:  # a sequence (N, T, C) has the same axes here
            image = image.transposed([2, 0, 1] if entry.axis else [0, 2, 1])
        values[name] = replace(image, integer=entry.integer)
    return values


def _value(made: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in made:
        raise ValueError(f"{where}: expected a value that a node computes before, got {name}")
    return made[name]


def check_operators(graph: NodeGraph) -> None:
    """Raise ValueError if an operator cannot be imported, before any node is read."""
    known = {*READERS, *FOLDS, *PARTS_OF_ATTENTION}
    expected = ", ".join(name for name in sorted(READERS) if name[0].isupper())
    for node in graph.nodes:
        if node.operator not in known:
            raise ValueError(
                f"node {node.name} has the operator {node.operator}, which cannot be imported; "
                f"expected one of {expected}"
            )


def _read(at: Reading) -> Any:
    """Return what a node computes: values, a constant, or a list for several outputs."""
    node = at.node
    if any(isinstance(x, Scores) for x in at.inputs):
        return read_scores(at)
    states = _states(at)
    if states is not None:
        return states
    if any(isinstance(x, Repeated) for x in at.inputs) and node.operator not in READ_STATES:
        raise at.fail("a constant row for each sample must be concatenated with a sequence")
    computed = any(isinstance(x, Value | Repeated) for x in at.inputs)
    if node.operator == "Shape" and computed:
        first, last = node.get("start", 0), node.get("end", None)
        return np.array(at.inputs[0].shape, np.int64)[first:last]
    batch = node.operator == "Expand" and not computed and at.inputs[1] is not None
    if not computed and not (batch and ANY_BATCH in at.inputs[1].reshape(-1)[:1]):
        if node.operator not in FOLDS:
            raise at.fail("expected a computed input, got constants only")
        source = node.inputs[0] if node.inputs else ""
        if node.operator == "Transpose" and source in at.graph.constants and at.inputs[0].ndim == 2:
            at.net.transposed[node.outputs[0]] = source
        return fold(node, at.inputs, at.graph.opset)
    if node.operator not in READERS:
        raise at.fail("expected constants, or a part of an activation that pydtnn has, got others")
    try:
        return READERS[node.operator](at)
    except ValueError as error:
        if str(error).startswith("node "):
            raise
        raise at.fail(str(error)) from error
    except (IndexError, KeyError, OverflowError, TypeError, ZeroDivisionError) as error:
        reason = f"{type(error).__name__}: {error}"  # inputs or attributes of another kind
        raise at.fail(f"inputs and attributes must suit the operator, got {reason}") from error


READ_STATES = ("Concat", "GRU", "LSTM")
"""Operators that read constants with a row for each sample."""


def _states(at: Reading) -> Repeated | None:
    """Return states (D, N, H) of a batch of any size before the first step; None for others."""
    node, given = at.node, at.inputs
    if node.operator in ("ConstantOfShape", "Expand"):
        shape = given[-1]
        if all(isinstance(x, np.ndarray) for x in given) and shape.size == 3:
            sizes = shape.reshape(-1)
            if sizes[1] == ANY_BATCH:
                one = np.array([sizes[0], 1, sizes[2]])
                return Repeated(fold(node, [*given[:-1], one], at.graph.opset), axis=1)
    if node.operator == "Slice" and isinstance(given[0], Repeated) and given[0].axis == 1:
        axes = given[3] if len(given) > 3 else None
        if isinstance(axes, np.ndarray) and not {1, -2} & {*axes.reshape(-1).tolist()}:
            return Repeated(fold(node, [given[0].array, *given[1:]], at.graph.opset), axis=1)
    return None


def _verify(model: Model, graph: NodeGraph, data: bytes) -> None:
    """Compare outputs of random samples with those of onnxruntime."""
    runtime = import_optional(RUNTIME, RUNTIME, f"{WHO}: verify=True")
    rng, samples, theirs = np.random.default_rng(0), [], {}
    batch = next((entry.batch for entry in graph.inputs.values()), 0) or 2
    tokens = min((c.shape[0] for c in graph.constants.values() if c.ndim == 2), default=1)
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        for value, entry in zip(session.get_inputs(), graph.inputs.values(), strict=True):
            shape = (batch, *entry.sizes)
            kind = value.type.removeprefix("tensor(").removesuffix(")")
            kind = {"float": "float32", "double": "float64"}.get(kind, kind)
            x = rng.integers(tokens, size=shape) if entry.integer else rng.standard_normal(shape)
            theirs[value.name] = np.moveaxis(x, 0, entry.axis).astype(kind)
            samples.append(channels_last(x.astype("float32")))
        expected = session.run(None, theirs)
    except Exception as error:  # of any type: those of onnxruntime have no common one
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"onnxruntime cannot run the file ({reason}); import it with verify=False to do "
            "without a comparison"
        ) from error
    given: Any = model.predict(tuple(samples) if len(samples) > 1 else samples[0])
    outputs = given if isinstance(given, tuple) else (given,)
    for name, a, b in zip(graph.outputs, outputs, expected, strict=True):
        a = np.asarray(a, "float64")
        _compare(name, a, like(a, b.astype("float64")), model.dtype.name)


def _compare(name: str, a: np.ndarray, b: np.ndarray, dtype: str) -> None:
    finite = np.isfinite(b)
    scale = float(abs(b[finite]).max(initial=0)) if a.shape == b.shape else 0.0
    if a.shape == b.shape and np.array_equal(a[~finite], b[~finite], equal_nan=True):
        error = float(abs(a[finite] - b[finite]).max(initial=0))
        if error <= TOLERANCES.get(dtype, TOLERANCE) * scale + 1e-30:
            return
        problem = f"differs by {error:.3g} of at most {scale:.3g}"
    else:
        problem = f"has the shape {a.shape} of {b.shape}, or other values that are not finite"
    raise ValueError(
        f"output {name} {problem} from what onnxruntime computes; the import is wrong, please "
        "report the file"
    )


def channels_last(x: np.ndarray) -> np.ndarray:
    """Return an image (N, C, ...) as (N, ..., C), a number as (N, 1), and others as they are."""
    x = x if x.ndim > 1 else x.reshape(-1, 1)
    return np.moveaxis(x, 1, -1) if x.ndim > 3 else x


def like(y: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return an output of another program with the axes of ours: (D, N, H) as (N, D, H)."""
    found = [channels_last(other)]
    if other.ndim == 3 and other.shape == (y.shape[1], y.shape[0], *y.shape[2:]):
        found.append(other.swapaxes(0, 1))
    return min(found, key=lambda x: abs(x - y).max() if x.shape == y.shape else np.inf)
