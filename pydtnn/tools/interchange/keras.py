"""Weights of Keras 2 and 3: ``.h5``, ``.weights.h5`` and ``.keras``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.layers.base import Shape
from pydtnn.saving.weights import check_numbers
from pydtnn.tools.interchange.archives import BEGIN, Archive, Buffer
from pydtnn.tools.interchange.hdf5 import Hdf5, Hdf5Node
from pydtnn.tools.interchange.matching import StateDictReport, Stored, fit, split
from pydtnn.tools.interchange.slots import slots_of
from pydtnn.utils.files import read_file
from pydtnn.utils.validate import check_bool

if TYPE_CHECKING:
    from pydtnn.model import Model

WHO = "load_keras_weights"

SUFFIXES = (".h5", ".hdf5", ".keras")
"""Of the files, which the command line recognises by them."""

NAMES = {
    "kernel": "weight",
    "depthwise_kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
    "embeddings": "weight",
}
"""PyTorch's names of the arrays of `ARRAYS`."""

ARRAYS = {
    "Conv1D": ("kernel", "bias"),
    "Conv2D": ("kernel", "bias"),
    "Conv2DTranspose": ("kernel", "bias"),
    "Conv3D": ("kernel", "bias"),
    "DepthwiseConv2D": ("depthwise_kernel", "bias"),
    "Dense": ("kernel", "bias"),
    "Embedding": ("embeddings",),
    "BatchNormalization": ("gamma", "beta", "moving_mean", "moving_variance"),
    "LayerNormalization": ("gamma", "beta"),
    "GroupNormalization": ("gamma", "beta"),
}
"""Arrays of the layers that are read, in the order in which Keras 3 stores them."""

CLASSES = {re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", kind).lower(): kind for kind in ARRAYS}
"""Classes of layers by the names of their groups in ``.weights.h5``, before a number, such as
"depthwise_conv2d"."""

CELL = ("kernel", "recurrent_kernel", "bias")
"""Arrays of a direction of an LSTM or a GRU, in the order in which Keras 3 stores them."""

DIRECTIONS = {"cell": "_l0", "forward_layer/cell": "_l0", "backward_layer/cell": "_l0_reverse"}
"""Ends of PyTorch's names of its arrays, by the groups of ``.weights.h5`` that contain them."""

GATES: dict[int, tuple[tuple[int, ...], Shape]] = {4: ((0, 1, 2, 3), ()), 3: ((1, 0, 2), (2,))}
"""By the number of gates of an LSTM, and of a GRU: their order in Keras, and the axes of the biases
before that of the gates."""

MAX_DEPTH = 32
"""Of networks in networks."""

MAX_ARRAYS = 1 << 17
"""Of all layers of a file."""

MAX_B_PER_NUMBER = 32
"""Size of a compressed record per number of the model: float64, and an optimizer's copies."""

MAX_FURTHER_B = 1 << 24
"""Size of a compressed record beyond that."""


def load_keras_weights(model: Model, path: str | Path, *, strict: bool = True) -> StateDictReport:
    """Load weights that Keras has saved, by layer and name.

    Layers are matched as by `load_state_dict`: by names if more than half of the model's have a
    counterpart of the same name, and otherwise by order, separately for each kind. Features behind
    Flatten have the same order here and in Keras.

    Parameters
    ----------
    model : Model
        Numbers are rounded to its dtype if the file has another.
    path : str or Path
        A file ``.keras``, ``.weights.h5`` or ``.h5``, written by Keras 3, Keras 2 or `tf_keras`. In
        a file ``.weights.h5`` the order of the layers is known for each class only.
    strict : bool
        As for `load_state_dict`.

    Returns
    -------
    StateDictReport
        With names such as "conv2d_1.weight", and shapes, as in PyTorch.

    Raises
    ------
    OSError
        If there is no such file, or it cannot be read.
    ValueError
        If it is damaged, compressed, refers to other files, has a layer of another class than
        convolutions, Dense, Embedding, LSTM, GRU (with ``reset_after=True``) and norms, does not
        fit the model, or contains values that are not valid weights; the model is not changed.
    """
    check_bool(WHO, "strict", strict)
    data = read_file(WHO, path)
    slots = [
        replace(slot, order=None, their_shape=slot.their_shape if slot.filters else slot.shape)
        for slot in slots_of(model)
    ]
    limit = MAX_B_PER_NUMBER * sum(prod(slot.shape) for slot in slots) + MAX_FURTHER_B
    try:
        content, layers = _opened(data, limit)
        arrays, series = _arrays(Hdf5(content).root, layers)
        _add_omitted(arrays)
        report, given = fit(slots, arrays, strict=strict, series=series)
        check_numbers(given, model.dtype)
    except ValueError as error:
        raise ValueError(f"{WHO}: {path}: {error}") from error
    model.load(given, strict=strict)
    return report


@dataclass(frozen=True)
class _Layer:
    """A layer in the configuration of a network."""

    kind: str
    options: Mapping[str, Any]


Layers = dict[str, _Layer]
"""Layers of a network in their order, by dotted names; empty if the file does not describe it."""


def _opened(data: bytes, limit: int) -> tuple[Buffer, Layers]:
    """Return the HDF5 file in a file of any kind, and the layers if they are a record of their own.

    Raises
    ------
    ValueError
        If it is an archive that is damaged or too large.
    """
    if not data.startswith(BEGIN):
        return data, {}
    archive = Archive(data)
    return archive.record("model.weights.h5", limit), _layers(
        bytes(archive.record("config.json", MAX_FURTHER_B))
    )


def _layers(config: bytes | str) -> Layers:
    """Return the layers of a network's configuration.

    Raises
    ------
    ValueError
        If it cannot be parsed.
    """
    try:
        network = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the description of the network is damaged ({type(error).__name__})"
        ) from error
    layers: Layers = {}

    def add(entry: Any, prefix: str, depth: int) -> None:
        options = entry.get("config") if isinstance(entry, dict) else None
        if not isinstance(options, dict) or depth > MAX_DEPTH:
            return
        name, inner = options.get("name"), options.get("layers")
        wrapped = options.get("layer")
        own = wrapped.get("config") if isinstance(wrapped, dict) else options
        if isinstance(own, dict) and own.get("reset_after") is False:
            raise ValueError(f"{name!r:.80}: a GRU must have reset_after=True, got False")
        if depth and isinstance(name, str):
            prefix = f"{prefix}.{name}".lstrip(".")
            layers[prefix] = _Layer(str(entry.get("class_name")), options)
        for part in inner if isinstance(inner, list) else ():
            add(part, prefix, depth + 1)

    add(network, "", 0)
    return layers


def _names(group: Hdf5Node, name: str) -> list[str] | None:
    """Return the names in an attribute, which Keras splits into numbered ones if it is long."""
    names = group.texts(name)
    parts = [] if names is None else [names]
    while names is None and (part := group.texts(f"{name}{len(parts)}")) is not None:
        parts.append(part)
    return [text for part in parts for text in part] if parts else None


def _arrays(root: Hdf5Node, layers: Layers) -> tuple[dict[str, Stored], Mapping[str, str]]:
    """Return the arrays of a file with PyTorch's names and shapes, and the series of the layers.

    Layers of the same series are in their order. The name of an array contains that of its layer,
    and that of the network of the layer if it is in another network.
    """
    if "model_weights" in root.names():
        config = root.texts("model_config")
        root, layers = root.find("model_weights"), _layers(config[0]) if config else {}
    arrays: dict[str, Stored] = {}
    names = _names(root, "layer_names")
    if names is not None:
        _add_named(root, names, layers, arrays)
        return arrays, {}
    found = [*_groups(root, "", set())]
    if not found:
        raise ValueError(
            "expected the layers and arrays of a file that Keras has saved, got none; save the "
            "model again"
        )
    place = {name: i for i, name in enumerate(layers)}
    series: dict[str, str] = {}
    known = all(name in place for name, *_ in found)
    for name, kind, group in sorted(found, key=lambda each: place.get(each[0], 0)):
        options = layers[name].options if name in layers else {}
        layer = name
        if kind in DIRECTIONS.values():
            parts = zip(CELL, map(group.find, sorted(group.names())), strict=False)
            _add_cell(arrays, name, kind, dict(parts), described=bool(layers))
            layer = split(f"{name}.weight_ih{kind}")[0]
        else:
            for what, number in _vars(group, kind, options):
                _add(arrays, name, what, group.find(number))
        if not known:
            series[layer] = re.sub(r"_\d+(?=/|$)|/(for|back)ward_layer", "", group.path)
    return arrays, series


def _add_omitted(arrays: dict[str, Stored]) -> None:
    """Add factors of 1 and terms of 0 of batch norms with ``scale=False`` or ``center=False``."""
    for name in [name for name in arrays if name.endswith(".running_mean")]:
        for what, value in (("weight", 1.0), ("bias", 0.0)):
            full, shape = name.replace(".running_mean", f".{what}"), arrays[name].shape
            arrays.setdefault(full, Stored(shape, partial(np.full, shape, value)))


def _add_named(root: Hdf5Node, names: list[str], layers: Layers, arrays: dict[str, Stored]) -> None:
    """Add the arrays of the older format, in which attributes contain their names."""
    depthwise = {
        name.rpartition(".")[2] for name, layer in layers.items() if layer.kind == "DepthwiseConv2D"
    }
    for outer in names:
        group = root.find(outer)
        names = _names(group, "weight_names") or []
        paths = {name.partition(":")[0]: name for name in names}
        for path, name in paths.items():
            layer, _, what = path.rpartition("/")
            if f"{layer}/recurrent_kernel" in paths and what in CELL:
                if what == "kernel":
                    own = {w: paths[f"{layer}/{w}"] for w in CELL if f"{layer}/{w}" in paths}
                    parts = {w: group.find(theirs) for w, theirs in own.items()}
                    _add_cell(arrays, *_direction(layer, paths), parts, described=bool(layers))
                continue
            if what not in NAMES:
                raise ValueError(
                    f"{name!r:.80} must be one of {', '.join(NAMES)}, the arrays of convolutions, "
                    f"Dense and norms, got {what!r:.80}"
                )
            if what == "kernel" and (layer or outer).rpartition("/")[2] in depthwise:
                what = "depthwise_kernel"  # as in Keras 2
            _add(arrays, (layer or outer).replace("/", "."), what, group.find(name))


def _direction(layer: str, paths: Iterable[str]) -> tuple[str, str]:
    """Return the layer, and the end of names, of a cell in the older format.

    >>> _direction("net/both/backward_a/gru_cell", ["net/both/forward_a/gru_cell/kernel"])
    ('net.both', '_l0_reverse')
    """
    layer = re.sub(r"/(lstm|gru)_cell(_\d+)?$", "", layer)
    for way, other, end in (("for", "back", "_l0"), ("back", "for", "_l0_reverse")):
        partner = re.sub(rf"/{way}(ward_[^/]*)$", rf"/{other}\1/", layer)
        if partner != layer and any(path.startswith(partner) for path in paths):
            return layer.rpartition("/")[0].replace("/", "."), end
    return layer.replace("/", "."), "_l0"


def _groups(group: Hdf5Node, prefix: str, seen: set[int]) -> Iterator[tuple[str, str, Hdf5Node]]:
    """Yield names, classes and groups of arrays of the layers in a group of ``.weights.h5``."""
    if group.address in seen or len(seen) > MAX_ARRAYS:
        raise ValueError("groups contain each other; the file is damaged")
    seen.add(group.address)
    for container in ("layers", "_layer_checkpoint_dependencies"):
        if container not in group.names():
            continue
        layers = group.find(container)
        for name in sorted(layers.names(), key=lambda name: (_class(name), _number(name))):
            inner = layers.find(name)
            own = inner.find("vars") if "vars" in inner.names() else None
            theirs = ((own and own.texts("name")) or [name])[0]
            theirs = f"{prefix}.{theirs}".lstrip(".")
            if own is not None and own.names():
                yield theirs, CLASSES.get(_class(name), name), own
            for place, direction in DIRECTIONS.items():
                cell, names = inner, [*place.split("/"), "vars"]
                while names and names[0] in cell.names():
                    cell = cell.find(names.pop(0))
                if not names:
                    yield theirs, direction, cell
            yield from _groups(inner, theirs, seen)


def _vars(group: Hdf5Node, kind: str, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the arrays of a layer of ``.weights.h5``, and their names in the file."""
    where, count = f"{group.path!r:.80}", len(group.names())
    if kind not in ARRAYS:
        raise ValueError(
            f"{where} must belong to one of the classes {', '.join(ARRAYS)}, got {kind!r:.80}"
        )
    whats = list(ARRAYS[kind])
    for what, option in (("gamma", "scale"), ("beta", "center")):
        if what in whats and options.get(option) is False:
            whats.remove(what)
    if count > len(whats) or ("gamma" in whats and count < len(whats)):
        raise ValueError(
            f"{where} must have the arrays {', '.join(whats)}, got {count}; if the layer has only "
            "some of them, save the model as .keras"
        )
    return [(what, str(i)) for i, what in enumerate(whats[:count])]


def _add(arrays: dict[str, Stored], layer: str, what: str, array: Hdf5Node) -> None:
    """Add an array, which must be the only one of its name."""
    name = f"{layer}.{NAMES[what]}"
    if name in arrays:
        raise ValueError(f"{array.path!r:.80}: names of layers must be unique, got two; rename one")
    if len(arrays) >= MAX_ARRAYS:
        raise ValueError(f"the file has more than {MAX_ARRAYS} arrays")
    read, given = array.reader(), array.shape
    if what == "depthwise_kernel" and len(given) == 4:
        kh, kw, channels, multiplier = given
        shape: Shape = (channels * multiplier, 1, kh, kw)
        axes: tuple[int, ...] = (2, 3, 0, 1)  # (kh, kw, C, M) -> (C, M, kh, kw)
    else:
        axes = tuple(range(len(given)))
        if what == "kernel" and len(axes) > 1:  # (..., inputs, outputs) -> (outputs, inputs, ...)
            axes = (axes[-1], axes[-2], *axes[:-2])
        shape = tuple(given[axis] for axis in axes)
    arrays[name] = Stored(shape, lambda: read().transpose(axes).reshape(shape))


def _add_cell(
    arrays: dict[str, Stored],
    layer: str,
    direction: str,
    parts: Mapping[str, Hdf5Node],
    *,
    described: bool,
) -> None:
    """Add the arrays of a direction of an LSTM, which has one bias, or a GRU, which has two."""
    shapes = {what: part.shape for what, part in parts.items()}
    units, rows = shapes.get("recurrent_kernel", ())[-2:] or (0, 0)
    order, axes = GATES.get(rows // (units or 1), ((), ()))
    if not order or shapes.get("bias", (*axes, rows))[:-1] != axes:
        raise ValueError(
            f"{layer!r:.80} must be an LSTM, or a GRU with reset_after=True, got arrays of shapes "
            f"{shapes}"
        )

    if axes and "bias" not in parts and not described:
        raise ValueError(
            f"{layer!r:.80}: the file does not say whether a GRU without biases has "
            "reset_after=True; save the model as .keras"
        )

    def add(what: str, read: Callable[[], np.ndarray], *shape: int) -> None:
        def gates() -> np.ndarray:
            array = read().T
            return array.reshape(len(order), -1, *shape[1:])[[*order]].reshape(shape)

        arrays[f"{layer}.{what}{direction}"] = Stored(shape, gates)

    for what, theirs in (("weight_ih", "kernel"), ("weight_hh", "recurrent_kernel")):
        add(what, parts[theirs].reader(), *shapes[theirs][::-1])
    if "bias" in parts:
        read = parts["bias"].reader()
        add("bias_ih", lambda: read()[0] if axes else read(), rows)
        add("bias_hh", lambda: read()[1] if axes else np.zeros(rows), rows)


def _class(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _number(name: str) -> int:
    number = re.search(r"_(\d{1,9})$", name)
    return int(number[1]) if number else 0
