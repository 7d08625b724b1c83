"""State dicts of PyTorch in files: read without executing what a file contains, or written."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.saving.weights import decode, encode, widened
from pydtnn.tools.interchange.matching import COUNTER, Stored, split
from pydtnn.tools.interchange.torch_files import Tensor, read_tensors, refers_to
from pydtnn.tools.interchange.unpickle import Skipped
from pydtnn.utils.files import path_inside, read_file, write_file
from pydtnn.utils.imports import import_optional
from pydtnn.utils.names import shorten

SAFETENSORS = ".safetensors"

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of the files of ``torch.save``, which `torch` writes."""

INDEX = ".index.json"
"""End of the name of a file that lists the files of a state dict in parts."""

MAX_INDEX_B = 1 << 26
"""Size of such a file."""

NESTED = ("state_dict", "model_state_dict", "model")
"""Entries of checkpoints that contain the state dict."""

PARALLEL = "module."
"""Prefix of all names in a state dict of DataParallel or DistributedDataParallel."""


def read_state_dict(
    who: str, source: str | Path | Mapping[str, Any], skipped: list[str] | None = None
) -> dict[str, Stored]:
    """Return the arrays of a state dict in the order of their definition, without their values.

    Parameters
    ----------
    who : str
        First word of error messages.
    source : str, Path or mapping
        A file in one of the two formats, the index of several in its folder, or tensors or arrays
        by name. The order of definition is not known for safetensors and an index, whose names are
        sorted, with numbers by value.
    skipped : list of str, optional
        Receives the names of classes and functions whose objects are not read.

    Raises
    ------
    OSError
        If there is no such file, or it cannot be read.
    ValueError
        If the file is damaged, or contains objects other than tensors.
    """
    skipped = [] if skipped is None else skipped
    if isinstance(source, Mapping):
        arrays = _arrays(who, source)
    else:
        path = Path(source)
        read = _in_parts if path.name.endswith(INDEX) else _in_file
        arrays = read(who, path, skipped)
    prefix = PARALLEL if all(name.startswith(PARALLEL) for name in arrays) else ""
    return {name.removeprefix(prefix): array for name, array in arrays.items()}


def _in_parts(who: str, path: Path, skipped: list[str]) -> dict[str, Stored]:
    """Return the arrays of files in the folder of an index, which has the file of each name."""
    data = read_file(who, path, MAX_INDEX_B)
    try:
        parts = json.loads(data)["weight_map"]
        files = {*parts.values()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{who}: {path}: expected JSON with a weight_map of names") from error
    places = {name: path_inside(who, path.parent, name, beside=path) for name in files}
    read = {name: _in_file(who, place, skipped) for name, place in places.items()}
    missing = [name for name, file in parts.items() if name not in read[file]]
    if missing:
        raise ValueError(
            f"{who}: {path}: files do not contain {shorten(missing, 4)}; download again"
        )
    return {name: read[parts[name]][name] for name in sorted(parts, key=_numbered)}


def _in_file(who: str, path: Path, skipped: list[str]) -> dict[str, Stored]:
    data = read_file(who, path)
    if path.suffix == SAFETENSORS:
        try:
            arrays = decode(data)
        except ValueError as error:
            raise ValueError(f"{who}: {path}: {error}") from error
        return _arrays(f"{who}: {path}", {n: arrays[n] for n in sorted(arrays, key=_numbered)})
    if path.suffix not in PICKLED:
        raise ValueError(f"{who}: expected {_suffixes()}, got {path}")
    try:
        content, others = read_tensors(data)
    except ValueError as error:
        raise ValueError(f"{who}: {path}: {error}; nothing of it was loaded") from error
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{who}: {path}: expected tensors by name, got {type(content).__name__}; save the "
            "state_dict() of the module"
        )
    skipped += others
    return _arrays(f"{who}: {path}", content, others)


def is_state_dict(path: str | Path) -> bool:
    """Return whether a file contains arrays under the names of PyTorch, not those of pydtnn."""
    path = Path(path)
    if path.suffix != SAFETENSORS:
        return path.suffix in PICKLED or path.name.endswith(INDEX)
    with suppress(ValueError):  # which the reader reports
        names = decode(read_file("train: --load", path))
        return any(name.rpartition(".")[2] in ("weight", COUNTER) for name in names)
    return False


def series_of(
    source: str | Path | Mapping[str, Any], arrays: Mapping[str, Stored]
) -> dict[str, str]:
    """Return the series of layers whose order is known; one if it is that of the definition.

    Names in safetensors are sorted: the order is known of layers that differ in a number.
    """
    if isinstance(source, Mapping) or Path(source).suffix in PICKLED:
        return {}
    layers = {split(name)[0] for name in arrays}
    return {layer: re.sub(r"\d+", "#", layer) for layer in layers}


def write_state_dict(who: str, path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a file in the format of its suffix, which is replaced atomically.

    Raises
    ------
    OSError
        If it cannot be written; an existing file is not changed.
    ImportError
        If the format requires PyTorch and it is not installed.
    ValueError
        If the suffix is another one.
    """
    suffix = Path(path).suffix
    if suffix == SAFETENSORS:
        write_file(who, path, encode(arrays))
        return
    if suffix not in PICKLED:
        raise ValueError(f"{who}: expected {_suffixes()}, got {path}")
    torch = import_optional("torch", "torch", f"{who}: writing {suffix}")
    buffer = io.BytesIO()
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    torch.save(tensors, buffer)
    write_file(who, path, buffer.getvalue())


def _arrays(
    where: str, entries: Mapping[str, Any], skipped: list[str] | None = None
) -> dict[str, Stored]:
    """Convert the tensors of a state dict, which may be an entry of a checkpoint."""
    for name in NESTED:
        if isinstance(entries.get(name), Mapping):
            entries = entries[name]
            break
    arrays: dict[str, Stored] = {}
    for name, value in entries.items():
        if isinstance(value, Skipped):
            continue
        tensor = isinstance(value, Tensor) or hasattr(value, "detach")
        if not isinstance(name, str) or not (tensor or isinstance(value, np.ndarray)):
            raise ValueError(
                f"{where}: expected tensors by name, got {type(value).__name__} for {name!r:.80}; "
                "save the state_dict() of the module"
            )
        problem = _problem(value)
        if problem:
            raise ValueError(
                f"{where}: expected dense tensors with values, but {name} {problem}; convert it "
                "before saving"
            )
        arrays[name] = Stored(tuple(value.shape), partial(_values, name, value))
    if not arrays:
        problem = refers_to(skipped[0]) if skipped else "expected tensors by name, got none"
        raise ValueError(f"{where}: {problem}")
    return arrays


def _problem(value: Any) -> str:
    """Return why a tensor has no values that can be read, or "" if it has."""
    if isinstance(value, Tensor):
        return value.problem
    if isinstance(value, np.ndarray):
        return ""
    if value.is_meta:
        return "is on the device meta and has no values"
    dense = str(value.layout) == "torch.strided" and not value.is_quantized
    return "" if dense else "is a sparse or quantised tensor, not a dense one"


def _values(where: str, value: Any) -> np.ndarray:
    """Return the elements of an array or tensor, of at least 32 bits."""
    if isinstance(value, np.ndarray):
        return widened(value)
    try:
        if isinstance(value, Tensor):
            return value.read()
        value = value.detach().cpu().resolve_conj().resolve_neg()
        if value.is_floating_point() and value.element_size() < 4:
            value = value.float()  # NumPy has no bfloat16 of its own
        return np.asarray(value.numpy())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: its values cannot be read ({error})") from error


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "layer.10" behind "layer.9"."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _suffixes() -> str:
    return f"a state dict in a file {shorten([SAFETENSORS, *PICKLED])}"
