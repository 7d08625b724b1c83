"""Networks of ONNX files as models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from pydtnn.interchange.onnx.graph import NodeGraph, parse
from pydtnn.interchange.onnx.readers import READERS, Step
from pydtnn.interchange.slots import NAMES, slots_of
from pydtnn.kernels import Backend
from pydtnn.layers import Block
from pydtnn.layers.blocks import Graph
from pydtnn.layers.initializers import get_initializer
from pydtnn.layers.node import Node, Outputs
from pydtnn.model import Model
from pydtnn.saving.weights import check_numbers
from pydtnn.utils.files import read_file

WHO = "import_onnx"


def import_onnx(
    path: str | Path, *, backend: Backend | str = "cpu", dtype: str = "float32"
) -> Model:
    """Read a convolutional or fully connected network from an ONNX file, with its weights.

    The model is one of layers of the library: it can be trained, and saved with
    `pydtnn.saving.save_model`. Images are ``(N, H, W, C)`` here and ``(N, C, H, W)`` in the file;
    so are outputs that are images. Names of layers are those of the nodes.

    Parameters
    ----------
    path : str or Path
        Of opset 7 or later; samples must have a fixed size.
    backend : Backend or str
    dtype : str
        See `Model`; numbers are rounded to it if the file has others.

    Returns
    -------
    Model

    Raises
    ------
    OSError
        If there is no such file, or it cannot be read.
    ImportError
        If onnx is not installed.
    ValueError
        If it is damaged, or contains an operator, or an option of one, that no layer has; the
        message contains node and operator.
    """
    data = read_file(WHO, path)
    try:
        graph = parse(WHO, data)
        steps = _steps(graph)
        net = NodeNetwork(steps, list(graph.inputs), graph.outputs)
        model = Model(net, list(graph.inputs.values()), backend=backend, dtype=dtype)
        _load(model, steps)
    except ValueError as error:
        raise ValueError(f"{WHO}: {path}: {error}") from error
    return model


class NodeNetwork(Block):
    """The network of an ONNX file; parameters are initialised with zeros, as weights follow.

    Parameters
    ----------
    steps : sequence of Step
    inputs, outputs : sequence of str
        Names of values.
    """

    def __init__(
        self, steps: Sequence[Step], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        super().__init__()
        self.steps, self.inputs, self.outputs = steps, inputs, outputs

    def wire(self, graph: Graph, *inputs: Node) -> Outputs:
        """Add the layers with their connections."""
        made = dict(zip(self.inputs, inputs, strict=True))
        for step in self.steps:
            sources = [_value(made, name, step.node.name) for name in step.inputs]
            layer = step.make([source.shape for source in sources])
            layer.name = step.node.name
            node = graph.add(layer, *sources)
            for p in layer.parameters:
                array = step.arrays[NAMES[p.name.rpartition(".")[2]]]
                if array.size != prod(p.shape):  # checked before memory is allocated
                    raise ValueError(f"{p.name} must have shape {p.shape}, got {array.shape}")
                p.initializer = get_initializer("zeros")
            made[step.node.outputs[0]] = node
        outputs = tuple(_value(made, name, "the output") for name in self.outputs)
        return outputs if len(outputs) > 1 else outputs[0]


def _value(made: Mapping[str, Node], name: str, where: str) -> Node:
    if name not in made:
        raise ValueError(f"{where}: expected a value that a node computes before, got {name}")
    return made[name]


def _steps(graph: NodeGraph) -> list[Step]:
    """Return a step for each node, in the order of execution.

    Raises
    ------
    ValueError
        If an operator cannot be imported; checked before any other node is read.
    """
    for node in graph.nodes:
        if node.operator not in READERS:
            raise ValueError(
                f"node {node.name} has the operator {node.operator}, which cannot be imported; "
                f"expected one of {', '.join(sorted(READERS))}"
            )
    steps: list[Step] = []
    computed: set[str] = set()
    for node in graph.nodes:
        if node.outputs[0] not in computed:
            step = READERS[node.operator](node, graph)
            computed.add(step.node.outputs[0])
            steps.append(step)
    return steps


def _load(model: Model, steps: Sequence[Step]) -> None:
    """Load the arrays of the steps into the model, after checking all of them."""
    arrays = {f"{s.node.name}.{what}": a for s in steps for what, a in s.arrays.items()}
    given: dict[str, np.ndarray] = {}
    for slot in slots_of(model):
        array = arrays[f"{slot.layer}.{slot.what}"]
        if array.shape != slot.their_shape:
            raise ValueError(
                f"{slot.their_name} must have shape {slot.their_shape}, got {array.shape}"
            )
        given[slot.name] = slot.to_ours(array)
    check_numbers(given, model.dtype)
    if given:
        model.load(given)
