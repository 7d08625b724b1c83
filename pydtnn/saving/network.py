"""A network as JSON values: its layers in order, their options and connections."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn import layers
from pydtnn.layers import Block, Layer
from pydtnn.layers.blocks import GraphBuilder
from pydtnn.layers.initializers import get_initializer
from pydtnn.layers.node import Node, Outputs
from pydtnn.layers.positions import Positions
from pydtnn.model.description import Description
from pydtnn.utils.arguments import Construction, construction_of
from pydtnn.utils.errors import describe
from pydtnn.utils.names import unknown

SAVED = Layer | Block | Positions
"""Classes of objects that are saved as a call of their constructor."""


def library_class(name: str) -> type | None:
    """Return the library's class with this name, of `SAVED`; none by a name of other libraries."""
    kind = getattr(layers, name) if name in layers.__all__ else None
    found = isinstance(kind, type) and issubclass(kind, SAVED) and kind.__name__ == name
    return kind if found and not inspect.isabstract(kind) else None


def name_of(kind: type) -> str:
    """Return the name of a class of the library, ``module:Class`` or ``file.py:Class``.

    Files are those of scripts, relative to the current folder if they are in it.
    """
    if library_class(kind.__name__) is kind:
        return kind.__name__
    module = sys.modules.get(kind.__module__)
    where = kind.__module__
    spec = getattr(module, "__spec__", None)
    # the script that is executed, and files that were imported by path
    if spec is None or where == "__main__" or where.startswith("pydtnn_own_"):
        path = Path(getattr(module, "__file__", None) or where)
        here = Path.cwd()
        where = str(path.relative_to(here)) if path.is_relative_to(here) else path.name
    return f"{where}:{kind.__qualname__}"


def class_of(name: Any, where: str, custom: Mapping[str, type]) -> type:
    """Return the class of a name: one of the library, or one of `custom`.

    Parameters
    ----------
    name : str
        As returned by `name_of`.
    where : str
        First words of error messages.
    custom : mapping of str to type
        Classes by name, with or without ``module:``.

    Raises
    ------
    ValueError
        If it is neither.
    TypeError
        If the class is no layer.
    """
    if not isinstance(name, str):
        raise ValueError(f"{where}: its class must be a name")
    short = name.rpartition(":")[2].rpartition(".")[2]
    if ":" not in name:
        known = library_class(name)
        if known is None:
            names = filter(library_class, layers.__all__)
            raise ValueError(f"{where}: {unknown('layer', name, names)}")
        return known
    kind = custom.get(name, custom.get(short))
    if kind is None:
        raise ValueError(
            f"{where}: {short} is not a layer of the library but {name}, which is not imported "
            f"from there; import it yourself and pass custom={{{short!r}: {short}}}"
        )
    if not isinstance(kind, type) or not issubclass(kind, SAVED):
        raise TypeError(f"{where}: custom[{short!r}] must be a class of layers, got {kind!r}")
    return kind


def call_to_json(call: Construction, where: str) -> dict[str, Any]:
    """Convert a layer's class and options, with defaults, so that changes of these do not matter.

    Initializers that JSON cannot represent are omitted, as saved parameters do not need them, and
    so are default values that it cannot represent.

    Raises
    ------
    ValueError
        If an option cannot be represented; the message begins with `where`.
    """
    try:
        bound = call.bind()
    except TypeError as error:
        raise ValueError(f"{where}: its options do not fit {call.kind.__name__}: {error}") from None
    given = dict(bound.arguments)
    bound.apply_defaults()
    options: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        try:
            options[name] = to_json(value, f"{where}: option {name}")
        except ValueError:
            if name in given and not name.endswith("initializer"):
                raise
    return {"class": name_of(call.kind), "options": options}


def to_json(value: Any, where: str) -> Any:
    """Convert a number, text, None, slice, layer, or a collection of them.

    Raises
    ------
    ValueError
        If it is something else; the message begins with `where`.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
        return {"slice": [to_json(part, where) for part in value]}
    if isinstance(value, tuple | list):
        parts = [to_json(part, where) for part in value]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: to_json(part, where) for key, part in value.items()}}
    if isinstance(value, SAVED):
        return {"layer": call_to_json(construction_of(value), where)}
    raise ValueError(
        f"{where} must be a number, text, a layer, or a list, tuple or dict of them to be saved, "
        f"got {type(value).__name__}; compute it in the constructor or in build"
    )


def call_from_json(entry: Any, where: str, custom: Mapping[str, type]) -> Any:
    """Construct a layer or block from its class and options.

    Raises
    ------
    ValueError
        If the class is unknown, or an option is unknown or invalid.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("options"), dict):
        raise ValueError(f"{where} must be an object with a class and options")
    kind = class_of(entry.get("class"), where, custom)
    signature = inspect.signature(kind)
    options = {
        name: from_json(value, f"{where}: option {name}", custom)
        for name, value in entry["options"].items()
    }
    for name, value in options.items():
        if name not in signature.parameters:
            raise ValueError(f"{where}: {kind.__name__} has no option {name}")
        expected = _COLLECTED.get(signature.parameters[name].kind)
        if expected is not None and not isinstance(value, expected):
            raise ValueError(f"{where}: option {name} must be a {expected.__name__}")
    try:
        ordered = {name: options[name] for name in signature.parameters if name in options}
        bound = inspect.BoundArguments(signature, ordered)
        return kind(*bound.args, **bound.kwargs)
    except Exception as error:  # of any type: the values are those of a file
        raise ValueError(f"{where}: {describe(error)}") from error


_COLLECTED: Mapping[Any, type] = {
    inspect.Parameter.VAR_POSITIONAL: tuple,
    inspect.Parameter.VAR_KEYWORD: dict,
}


def from_json(value: Any, where: str, custom: Mapping[str, type]) -> Any:
    """Convert what `to_json` returned back.

    Raises
    ------
    ValueError
        If it is something else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [from_json(part, where, custom) for part in value]
    if isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "layer":
            return call_from_json(content, where, custom)
        if kind in _KINDS and isinstance(content, _KINDS[kind][0]):
            inner = content
            if isinstance(content, list):
                inner = [from_json(part, where, custom) for part in content]
            elif isinstance(content, dict):
                inner = {key: from_json(part, where, custom) for key, part in content.items()}
            try:
                return _KINDS[kind][1](inner)
            except (ValueError, TypeError):
                pass
    raise ValueError(f"{where} must be a value that was saved, got {str(value)[:40]}")


_KINDS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "float": (str, float),
    "tuple": (list, tuple),
    "slice": (list, lambda parts: slice(*parts)),
    "dict": (dict, dict),
}
"""JSON representation of values that are not JSON values, and their conversion."""


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


class SavedNetwork(Block):
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

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
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
