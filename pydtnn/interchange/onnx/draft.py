"""An ONNX graph under construction."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.layers.base import Shape
from pydtnn.utils.optional import import_optional


class Draft:
    """Nodes and constants of a graph.

    Parameters
    ----------
    who : str
        First words of errors.
    dtype : numpy.dtype
        Of floating-point constants.

    Attributes
    ----------
    nodes, constants : list
        Messages NodeProto and TensorProto of ONNX.
    """

    def __init__(self, who: str, dtype: np.dtype) -> None:
        self.helper = import_optional("onnx.helper", "onnx", who)
        self.numpy = import_optional("onnx.numpy_helper", "onnx", who)
        self.dtype = dtype
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._names: set[str] = set()

    def constant(self, name: str, value: Any) -> str:
        """Add an array, integers as int64; return its name. It may have been added before."""
        if name in self._names:
            return name
        self._names.add(name)
        array = np.asarray(value)
        dtype = np.int64 if array.dtype.kind == "i" else self.dtype
        self.constants.append(self.numpy.from_array(array.astype(dtype, order="C"), name))
        return name

    def node(
        self, operator: str, inputs: list[str], output: str, *, name: str = "", **attributes: Any
    ) -> str:
        """Add a node of one output, which is named as the node by default; return its name."""
        made = self.helper.make_node(operator, inputs, [output], name=name or output, **attributes)
        self.nodes.append(made)
        return output

    def reorder(self, name: str, order: np.ndarray) -> None:
        """Take the features of an output in another order."""
        (made,) = [node for node in self.nodes if name in node.output]
        made.output[0] = f"{name}.theirs"
        for node in self.nodes:
            node.input[:] = [f"{name}.theirs" if given == name else given for given in node.input]
        indices = self.constant(f"{name}.order", order)
        self.node("Gather", [f"{name}.theirs", indices], name, name=f"{name}.ordered", axis=1)

    def value(self, name: str, shape: Shape, dtype: str | None = None) -> Any:
        """Return the declaration of an input or output, with batches of any size."""
        kind = self.helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
        return self.helper.make_tensor_value_info(name, kind, ["N", *channels_first(shape)])


def channels_first(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an entry for each axis of a sample in the order of ONNX: (C, H, W) for images."""
    return (shape[-1], *shape[:-1]) if len(shape) >= 3 else shape
