"""Weights of Keras 2 and 3: ``.h5``, ``.weights.h5`` and ``.keras``.

HDF5 can refer to other files (external links and storage, virtual datasets), contain cycles, and
declare or decompress more than the memory. Only groups and datasets in the file itself are read,
and values only of arrays that the model has.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.interchange.archives import BEGIN, Archive, Buffer
from pydtnn.interchange.matching import StateDictReport, Stored, fit
from pydtnn.interchange.slots import slots_of
from pydtnn.layers.base import Shape
from pydtnn.saving.weights import check_numbers
from pydtnn.utils.files import read_file
from pydtnn.utils.optional import import_optional
from pydtnn.utils.validate import truth

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
}
"""PyTorch's names of the arrays of `ARRAYS`."""

ARRAYS = {
    "Conv2D": ("kernel", "bias"),
    "Conv2DTranspose": ("kernel", "bias"),
    "Conv3D": ("kernel", "bias"),
    "DepthwiseConv2D": ("depthwise_kernel", "bias"),
    "Dense": ("kernel", "bias"),
    "BatchNormalization": ("gamma", "beta", "moving_mean", "moving_variance"),
    "LayerNormalization": ("gamma", "beta"),
    "GroupNormalization": ("gamma", "beta"),
}
"""Arrays of the layers that are read, in the order in which Keras 3 stores them."""

CLASSES = {
    "conv2d": "Conv2D",
    "conv2d_transpose": "Conv2DTranspose",
    "conv3d": "Conv3D",
    "depthwise_conv2d": "DepthwiseConv2D",
    "dense": "Dense",
    "batch_normalization": "BatchNormalization",
    "layer_normalization": "LayerNormalization",
    "group_normalization": "GroupNormalization",
}
"""Classes of layers by the names of their groups in ``.weights.h5``, before a number."""

UNREAD = ("optimizer", "seed_generator", "metrics", "loss_tracker")
"""Groups of ``.weights.h5`` without weights of layers."""

MAX_DEPTH = 32
"""Of networks in networks."""

MAX_NAMES_B = 1 << 28
"""Memory that the names in one attribute may take."""

PER_NUMBER_B = 32
"""Size of a compressed record per number of the model: float64, and an optimizer's copies."""

FURTHER_B = 1 << 24
"""Size of a compressed record beyond that, and of chunks of datasets."""

FILTERS = (1, 2, 3)
"""HDF5's numbers of deflate, shuffle and Fletcher's checksum."""


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
    ImportError
        If h5py is not installed.
    ValueError
        If it is damaged, refers to other files, has a layer of another class than convolutions,
        Dense and norms, does not fit the model, or contains values that are not valid weights; the
        model is not changed.
    """
    truth(WHO, "strict", strict)
    h5py = import_optional("h5py", "h5py", f"{WHO}: reading {Path(path).suffix}")
    data = read_file(WHO, path)
    slots = [
        replace(slot, order=None, their_shape=slot.their_shape if slot.filters else slot.shape)
        for slot in slots_of(model)
    ]
    limit = PER_NUMBER_B * sum(prod(slot.shape) for slot in slots) + FURTHER_B
    try:
        try:
            content, layers = _opened(data, limit)
            with h5py.File(io.BytesIO(content)) as opened:
                file = _File(h5py, opened, len(content))
                arrays, series = _arrays(file, layers)
                report, given = fit(slots, arrays, strict=strict, series=series)
        except (OSError, KeyError, RuntimeError, AttributeError, TypeError) as error:
            raise ValueError(
                "expected the layers and arrays of a file that Keras has saved, got one that is "
                f"damaged or another ({type(error).__name__})"
            ) from error
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
        bytes(archive.record("config.json", FURTHER_B))
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
        if depth and isinstance(name, str):
            prefix = f"{prefix}.{name}".lstrip(".")
            layers[prefix] = _Layer(str(entry.get("class_name")), options)
        for part in inner if isinstance(inner, list) else ():
            add(part, prefix, depth + 1)

    add(network, "", 0)
    return layers


class _File:
    """An HDF5 file in memory, of which no link to elsewhere is followed."""

    def __init__(self, h5py: Any, file: Any, size: int) -> None:
        self._h5py, self.root, self._size = h5py, file, size

    def find(self, group: Any, path: str) -> Any:
        """Return the group or dataset at a path in a group.

        Raises
        ------
        ValueError
            If there is none, or a name is none of a group, or a link leads elsewhere.
        """
        found = group
        for name in path.split("/"):
            if name in ("", ".", "..") or not isinstance(found, self._h5py.Group):
                raise ValueError(f"{path!r:.80} is not the name of an array")
            link = found.get(name, getlink=True)
            if link is None:
                raise ValueError(f"{path!r:.80} is missing")
            if not isinstance(link, self._h5py.HardLink):
                raise ValueError(f"{path!r:.80} is a link to another place or file; copy the array")
            found = found[name]
        return found

    def groups(self, group: Any) -> dict[str, Any]:
        """Return the groups in a group by name, those with numbers in their order."""
        names = sorted(group, key=lambda name: (_class(name), _number(name)))
        found = {name: self.find(group, name) for name in names}
        return {name: each for name, each in found.items() if isinstance(each, self._h5py.Group)}

    def is_group(self, group: Any, name: str) -> bool:
        """Return whether a group contains a group of a name."""
        return name in group and isinstance(self.find(group, name), self._h5py.Group)

    def names(self, group: Any, name: str) -> list[str]:
        """Return the names in an attribute, which Keras splits into numbered ones if it is long.

        Raises
        ------
        KeyError
            If it is missing.
        ValueError
            If it does not contain names.
        """
        attributes = group.attrs
        if name not in attributes:
            parts: list[str] = []
            while f"{name}{len(parts)}" in attributes:
                parts.append(f"{name}{len(parts)}")
            if parts:
                return [text for part in parts for text in self._texts(group, part)]
        return self._texts(group, name)

    def text(self, group: Any, name: str) -> str | None:
        """Return the text in an attribute, or None if there is none."""
        if name not in group.attrs:
            return None
        texts = self._texts(group, name)
        if len(texts) != 1:
            raise ValueError(f"attribute {name} must be a text")
        return texts[0]

    def _texts(self, group: Any, name: str) -> list[str]:
        attribute = group.attrs.get_id(name)
        if attribute.shape is None or prod(attribute.shape) == 0:
            return []
        kind = attribute.dtype.kind
        strings = self._h5py.check_string_dtype(attribute.dtype)
        if kind != "S" and strings is None:
            raise ValueError(f"attribute {name} must contain names, got {attribute.dtype}")
        # Each of them may refer to the same text, which is as long as all that is not an array.
        if kind != "S" and prod(attribute.shape) * self._unused() > MAX_NAMES_B:
            raise ValueError(f"attribute {name} may need more than {MAX_NAMES_B} B; save it again")
        values = np.atleast_1d(np.asarray(group.attrs[name], object)).ravel()
        return [
            value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
            for value in values
        ]

    def _unused(self) -> int:
        """Return the size of the file without its arrays."""
        stored: list[int] = []
        self.root.visititems(
            lambda _, each: (
                stored.append(each.id.get_storage_size())
                if isinstance(each, self._h5py.Dataset)
                else None
            )
        )
        return max(self._size - sum(stored), 0)

    def dataset(self, group: Any, path: str) -> Any:
        """Return a dataset whose values can be read without another file or much memory.

        Raises
        ------
        ValueError
            If it is none, refers to other files, or is compressed in an unknown way.
        """
        found = self.find(group, path)
        if not isinstance(found, self._h5py.Dataset) or found.shape is None:
            raise ValueError(f"{path!r:.80} is not an array")
        plist = found.id.get_create_plist()
        if plist.get_external_count() or found.is_virtual:
            raise ValueError(
                f"{path!r:.80} has its values in another file, which is not read; copy them into "
                "this one"
            )
        if found.dtype.kind != "f" or found.dtype.itemsize > 8:
            raise ValueError(
                f"{path!r:.80} must contain floating-point numbers, such as float32, got "
                f"{found.dtype}; convert it"
            )
        size = prod(found.shape) * found.dtype.itemsize
        filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
        if len({*filters}) < len(filters) or not {*filters} <= {*FILTERS}:
            raise ValueError(f"{path!r:.80} is compressed in another way than by gzip; convert it")
        if found.chunks is None:
            if found.id.get_storage_size() < size:
                raise ValueError(f"{path!r:.80} has no values in the file")
        elif prod(found.chunks) * found.dtype.itemsize > size + FURTHER_B:
            raise ValueError(f"{path!r:.80} has chunks that are larger than the array; convert it")
        return found

    def read(self, path: str, dataset: Any) -> np.ndarray:
        """Return the values of a dataset whose shape is that of an array of the model.

        Raises
        ------
        ValueError
            If they cannot be read.
        """
        try:
            if dataset.chunks is not None:
                self._check_chunks(path, dataset)
            return np.asarray(dataset[()])
        except (OSError, RuntimeError, zlib.error) as error:
            raise ValueError(f"the values of {path!r:.80} are damaged ({error})") from error

    def _check_chunks(self, path: str, dataset: Any) -> None:
        """Decompress each chunk up to its size: HDF5 would decompress as much as there is."""
        plist = dataset.id.get_create_plist()
        filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
        if 1 not in filters:
            return
        skipped = 1 << filters.index(1)
        limit = prod(dataset.chunks) * dataset.dtype.itemsize + 16  # and a checksum
        chunks: list[Any] = []
        dataset.id.chunk_iter(chunks.append)
        for chunk in chunks:
            if chunk.filter_mask & skipped:
                continue
            _, stored = dataset.id.read_direct_chunk(chunk.chunk_offset)
            if len(zlib.decompressobj().decompress(stored, limit + 1)) > limit:
                raise ValueError(
                    f"{path!r:.80} decompresses to more than its shape; the file is damaged"
                )


def _arrays(file: _File, layers: Layers) -> tuple[dict[str, Stored], Mapping[str, str]]:
    """Return the arrays of a file with PyTorch's names and shapes, and the series of the layers.

    Layers of the same series are in their order. The name of an array contains that of its layer,
    and that of the network of the layer if it is in another network.
    """
    root = file.root
    if file.is_group(root, "model_weights"):
        config = file.text(root, "model_config")
        root, layers = file.find(root, "model_weights"), _layers(config) if config else {}
    arrays: dict[str, Stored] = {}
    if any(name.startswith("layer_names") for name in root.attrs):
        _add_named(file, root, layers, arrays)
        return arrays, {}
    series: dict[str, str] = {}
    found = [*_groups(file, root, "", "", 0)]
    if not found:
        raise ValueError(
            "expected the layers and arrays of a file that Keras has saved, got none; save the "
            "model again"
        )
    place = {name: i for i, name in enumerate(layers)}
    known = all(name in place for name, *_ in found)
    for name, kind, where, group in sorted(found, key=lambda each: place.get(each[0], 0)):
        options = layers[name].options if name in layers else {}
        for what, path in _vars(file, group, where, kind, options):
            _add(file, arrays, name, what, f"{where}/vars/{path}", file.dataset(group, path))
        if not known:
            series[name] = re.sub(r"_\d+(?=/|$)", "", where)
    return arrays, series


def _add_named(file: _File, root: Any, layers: Layers, arrays: dict[str, Stored]) -> None:
    """Add the arrays of the older format, in which attributes contain their names."""
    depthwise = {
        name.rpartition(".")[2] for name, layer in layers.items() if layer.kind == "DepthwiseConv2D"
    }
    for outer in file.names(root, "layer_names"):
        group = file.find(root, outer)
        for name in file.names(group, "weight_names"):
            layer, _, what = name.partition(":")[0].rpartition("/")
            if what not in NAMES:
                raise ValueError(
                    f"{name!r:.80} must be one of {', '.join(NAMES)}, the arrays of convolutions, "
                    f"Dense and norms, got {what!r:.80}"
                )
            if what == "kernel" and (layer or outer).rpartition("/")[2] in depthwise:
                what = "depthwise_kernel"  # as in Keras 2
            theirs = (layer or outer).replace("/", ".")
            _add(file, arrays, theirs, what, name, file.dataset(group, name))


def _groups(
    file: _File, group: Any, prefix: str, where: str, depth: int
) -> Iterator[tuple[str, str, str, Any]]:
    """Yield name, class, path and variables of the layers in a group of ``.weights.h5``."""
    if depth > MAX_DEPTH:
        raise ValueError(f"groups are nested more than {MAX_DEPTH} deep; the file is damaged")
    for container in ("layers", "_layer_checkpoint_dependencies"):
        if not file.is_group(group, container):
            continue
        for name, inner in file.groups(file.find(group, container)).items():
            path = f"{where}/{name}".lstrip("/")
            own = file.find(inner, "vars") if file.is_group(inner, "vars") else None
            theirs = (file.text(own, "name") if own is not None else None) or name
            theirs = f"{prefix}.{theirs}".lstrip(".")
            if own is not None and len(own):
                yield theirs, CLASSES.get(_class(name), name), path, own
            yield from _groups(file, inner, theirs, path, depth + 1)


def _vars(
    file: _File, group: Any, where: str, kind: str, options: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the arrays of a layer of ``.weights.h5``, and their names in the file."""
    if kind not in ARRAYS:
        raise ValueError(
            f"{where} must be a layer of one of the classes {', '.join(ARRAYS)}, got {kind!r:.80}"
        )
    whats = list(ARRAYS[kind])
    for what, option in (("gamma", "scale"), ("beta", "center")):
        if what in whats and options.get(option) is False:
            whats.remove(what)
    count = len(group)
    if len(whats) - count == 2 and "moving_mean" in whats:
        whats = whats[2:]
    if "gamma" in whats and len(whats) != count:
        raise ValueError(
            f"{where} has {count} of the arrays {', '.join(whats)}, and the file does not say "
            "which; save the model as .keras"
        )
    if count > len(whats):
        raise ValueError(f"{where} must have at most {len(whats)} arrays, got {count}")
    return [(what, str(i)) for i, what in enumerate(whats[:count])]


def _add(
    file: _File, arrays: dict[str, Stored], layer: str, what: str, path: str, dataset: Any
) -> None:
    """Add an array, which must be the only one of its name."""
    name = f"{layer}.{NAMES[what]}"
    if name in arrays:
        raise ValueError(f"{path!r:.80}: names of layers must be unique, got two; rename one")
    shape = _shape(what, dataset.shape)
    arrays[name] = Stored(shape, partial(_converted, file, path, what, dataset, shape))


def _shape(what: str, shape: Shape) -> Shape:
    """Return the shape of an array in PyTorch's layout."""
    if what == "depthwise_kernel" and len(shape) == 4:
        kh, kw, channels, multiplier = shape
        return (channels * multiplier, 1, kh, kw)
    return tuple(shape[axis] for axis in _axes(what, len(shape)))


def _converted(file: _File, path: str, what: str, dataset: Any, shape: Shape) -> np.ndarray:
    """Return the values of an array in PyTorch's layout."""
    array = file.read(path, dataset)
    if what == "depthwise_kernel" and array.ndim == 4:
        return array.transpose(2, 3, 0, 1).reshape(shape)  # (kh, kw, C, M) -> (C, M, kh, kw)
    return array.transpose(_axes(what, array.ndim))


def _axes(what: str, count: int) -> tuple[int, ...]:
    if what == "kernel" and count > 1:  # (..., inputs, outputs) -> (outputs, inputs, ...)
        return (count - 1, count - 2, *range(count - 2))
    return tuple(range(count))


def _class(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def _number(name: str) -> int:
    number = re.search(r"_(\d{1,9})$", name)
    return int(number[1]) if number else 0
