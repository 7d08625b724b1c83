"""A network as JSON values: its layers in order, their options and connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydtnn.layers import Block, Layer
from pydtnn.layers.blocks import Graph
from pydtnn.layers.initializers import get_initializer
from pydtnn.layers.node import Node, Outputs
from pydtnn.model.description import Description
from pydtnn.saving.values import call_from_json, call_to_json

Shape = tuple[int, ...]


def layers_to_json(description: Description) -> list[dict[str, Any]]:
    """Convert the layers of a model.

    Raises
    ------
    ValueError
        If an option of a layer cannot be represented; the message contains both.
    """
    entries: list[dict[str, Any]] = []
    for part in description.parts:
        what: dict[str, Any] = {"same_as": part.same_as}
        if not part.same_as:
            what = call_to_json(part.layer, f"layer {part.name}")
            what["options"].pop("name", None)  # the dotted name contains it
        entries.append(
            {"name": part.name, **what, "inputs": list(part.inputs), "shape": list(part.shape)}
        )
    return entries


class Network(Block):
    """The network of a saved model, with the original names.

    Parameters are initialised with zeros, as weights follow.

    Parameters
    ----------
    inputs : sequence of str
        Names of the inputs of the model.
    entries : list of dict
        As returned by `layers_to_json`, with checked types.
    outputs : sequence of str
        Names of the layers whose outputs are those of the model.
    custom : mapping of str to type
        Classes of layers that are not in the library.

    Raises
    ------
    ValueError
        If a class is unknown, an option is invalid, or a name is missing.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        entries: list[dict[str, Any]],
        outputs: Sequence[str],
        custom: Mapping[str, type],
    ) -> None:
        super().__init__()
        self.inputs, self.entries, self.outputs = inputs, entries, outputs
        self.layers: dict[str, Layer] = {}
        known = set(inputs)
        for entry in entries:
            name, where = entry["name"], f"layer {entry['name']}"
            _require(known, entry["inputs"], where)
            if name in known:
                raise ValueError(f"{where}: names must be unique, got two")
            known.add(name)
            if "same_as" in entry:
                _require(self.layers, [entry["same_as"]], where)
                self.layers[name] = self.layers[entry["same_as"]]
                continue
            layer = call_from_json(entry, where, custom)
            if not isinstance(layer, Layer):
                raise ValueError(f"{where}: expected a layer, got {type(layer).__name__}")
            self.layers[name] = layer
        _require(known, outputs, "outputs")

    def wire(self, graph: Graph, *inputs: Node) -> Outputs:
        """Add the layers with their connections.

        Raises
        ------
        ValueError
            If the output of a layer has another shape than the saved one.
        """
        made = dict(zip(self.inputs, inputs, strict=True))
        for entry in self.entries:
            layer = self.layers[entry["name"]]
            if "same_as" in entry:
                layer = layer.another_use()
            layer.name = entry["name"]
            node = graph.add(layer, *(made[name] for name in entry["inputs"]))
            if node.shape != tuple(entry["shape"]):
                raise ValueError(
                    f"layer {entry['name']}: expected an output of shape {tuple(entry['shape'])}, "
                    f"as saved, got {node.shape}"
                )
            for p in layer.parameters:
                p.initializer = get_initializer("zeros")
            made[entry["name"]] = node
        return tuple(made[name] for name in self.outputs)


def _require(known: Any, names: Sequence[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: {name} is not the name of an earlier layer or input")
