"""The layers of a model as they were constructed, before fusion, and how they are connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, overload

from pydtnn.layers.base import Layer, Shape
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Parameter
from pydtnn.utils.arguments import Construction, construction_of
from pydtnn.utils.errors import MissingNameError
from pydtnn.utils.names import unknown


class Parameters(dict[str, Parameter]):
    """A model's parameters by name."""

    def __missing__(self, name: str) -> Parameter:
        raise MissingNameError(unknown("parameter", str(name), self))

    if not TYPE_CHECKING:

        def __call__(self) -> NoReturn:
            raise TypeError(
                "Model.parameters: is a dict and cannot be called; use model.parameters.values(), "
                "or items() for names, too"
            )


class Layers(list[Layer]):
    """A model's layers in the order they run; ``layers["linear0"]`` is that of a name."""

    @overload
    def __getitem__(self, index: SupportsIndex | str) -> Layer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, str):
            return super().__getitem__(index)
        found = {layer.name: layer for layer in self}
        if index not in found:
            raise MissingNameError(unknown("layer", index, map(str, found)))
        return found[index]


@dataclass(frozen=True, eq=False)
class NodeSpec:
    """A node of the graph.

    Attributes
    ----------
    name : str
        Dotted name, unique in the model.
    layer : Construction
        Class and arguments of the layer.
    inputs : tuple of str
        Names of the parts, or of the inputs of the model, whose outputs the layer reads.
    shape : tuple of int
        Shape of the output.
    same_as : str
        Name of the first part that has the same layer; empty for that part itself.
    """

    name: str
    layer: Construction
    inputs: tuple[str, ...]
    shape: Shape
    same_as: str = ""


@dataclass(frozen=True, eq=False)
class Description:
    """A network that is independent of the blocks which have wired it.

    Attributes
    ----------
    inputs : tuple of (str, tuple of int)
        Names and shapes of the model's inputs.
    parts : tuple of Part
        In the order of execution.
    outputs : tuple of str
        Names of the parts whose outputs are those of the model.
    fused : bool
        Whether the model fuses layers.
    """

    inputs: tuple[tuple[str, Shape], ...]
    parts: tuple[NodeSpec, ...]
    outputs: tuple[str, ...]
    fused: bool


def describe(
    inputs: Sequence[Node], nodes: Sequence[Node], outputs: Sequence[Node], *, fused: bool
) -> Description:
    """Describe a graph that contains all nodes and is not fused yet.

    Parameters
    ----------
    inputs, outputs : sequence of Node
    nodes : sequence of Node
        All nodes, with the inputs.
    fused : bool
    """
    names: dict[Node, str] = {}
    first: dict[int, str] = {}  # name of the first node of each layer
    parts: list[NodeSpec] = []
    for node in nodes:
        names[node] = node.name
        if node not in inputs:
            same_as = first.setdefault(id(node.layer.source or node.layer), names[node])
            parts.append(
                NodeSpec(
                    names[node],
                    construction_of(node.layer),
                    tuple(names[source] for source in node.inputs),
                    node.shape,
                    same_as if same_as != names[node] else "",
                )
            )
    return Description(
        tuple((names[node], node.shape) for node in inputs),
        tuple(parts),
        tuple(names[node] for node in outputs),
        fused,
    )
