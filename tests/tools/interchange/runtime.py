"""ONNX files of nodes, and what onnxruntime computes beside a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pydtnn.model import Model


class Node(NamedTuple):
    """A node of a graph, of which `write` makes one of onnx, which takes long to import."""

    operator: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]


def node(operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Node:
    return Node(operator, inputs, outputs, attributes)


def write(
    path: Path,
    nodes: list[Node],
    shape: tuple[Any, ...],
    constants: dict[str, Any] | None = None,
    opset: int = 18,
    kind: str = "FLOAT",
) -> Path:
    """A file of nodes that read "x" and compute "y"."""
    onnx: Any = pytest.importorskip("onnx", reason="onnx is not installed; pip install onnx")
    helper, number = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node(*one[:3], **one.attributes) for one in nodes],
        "graph",
        [helper.make_tensor_value_info("x", onnx.TensorProto.DataType.Value(kind), shape)],
        [helper.make_tensor_value_info("y", number, None)],
        [
            onnx.numpy_helper.from_array(np.asarray(array), name)
            for name, array in (constants or {}).items()
        ],
    )
    imports = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def compute(path: Path, *xs: np.ndarray) -> Any:
    """Outputs that onnxruntime computes for images (N, H, W, C), sequences or features."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    given = {}
    for value, x in zip(session.get_inputs(), xs, strict=True):
        x = np.moveaxis(x, -1, 1) if x.ndim > 3 else x
        given[value.name] = x.astype("int64") if value.type == "tensor(int64)" else x
    outputs = [np.moveaxis(y, 1, -1) if y.ndim > 3 else y for y in session.run(None, given)]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def randomized(model: Model, seed: int = 0) -> Model:
    """The model with statistics, biases and norms that are neither 0 nor 1, in float32."""
    rng = np.random.default_rng(seed)
    state = {
        name: rng.uniform(0.5, 1.0, array.shape).astype("float32") if array.ndim == 1 else array
        for name, array in model.state().items()
    }
    model.load(state)
    return model


def samples(model: Model, count: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(count, *shape)).astype("float32") for shape in model.input_shapes]


def assert_close(ours: Any, theirs: Any) -> None:
    scale = np.abs(theirs).max()
    assert 1e-3 < scale < 1e8
    assert np.abs(ours - theirs).max() < 1e-5 * scale
