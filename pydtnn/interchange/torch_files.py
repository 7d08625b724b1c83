"""Tensors in the files of ``torch.save``, read without PyTorch and without executing anything.

A file is a zip archive with a pickle and a record for each storage of tensors, or, as PyTorch wrote
it before version 1.6, pickles followed by the storages. The pickle is interpreted by
`pydtnn.data.cifar`: it can only create dictionaries, lists, numbers, strings and the objects of
this module. A tensor is a shape, strides and a storage, which need not agree with each other: a
file of 1 KB may declare 2^33 elements with strides of 0. Values are therefore not read before the
shape of the tensor is known to be that of an array of the model.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from pydtnn.data.cifar import DAMAGED, Refused, one_line, run_pickle
from pydtnn.interchange.matching import Stored, split
from pydtnn.layers.base import Shape
from pydtnn.saving.weights import decode, encode
from pydtnn.utils.files import read_file, write_file
from pydtnn.utils.imports import import_optional
from pydtnn.utils.names import some

Buffer = bytes | memoryview

BEGIN = b"PK\x03\x04"
"""First bytes of an archive, and of each record."""

INVALID = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError)
"""Errors of an archive that is damaged, encrypted or of an unknown version."""


class Archive:
    """A zip archive in memory.

    Attributes
    ----------
    names : set of str
        Of its records.

    Raises
    ------
    ValueError
        If it is damaged.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except INVALID as error:
            raise ValueError(str(error)) from error
        self.names = {*self._zip.namelist()}

    def record(self, name: str, limit: int) -> Buffer:
        """Return the content of a record, which is not copied if it is not compressed.

        Parameters
        ----------
        name : str
        limit : int
            Largest size of a compressed record, in B.

        Raises
        ------
        ValueError
            If it is missing, damaged, too large or not readable.
        """
        try:
            info = self._zip.getinfo(name)
            if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                return self._stored(info)
            if info.compress_type != zipfile.ZIP_DEFLATED:
                raise ValueError(f"record {name} is encrypted or of an unknown compression")
            if info.file_size > limit:
                raise ValueError(
                    f"record {name} is compressed and would become {info.file_size} B, more than "
                    f"the {limit} B that the model requires"
                )
            with self._zip.open(info) as stream:
                return stream.read(info.file_size)
        except KeyError:
            raise ValueError(f"record {name} is missing") from None
        except INVALID as error:
            raise ValueError(f"record {name}: {error}") from error

    def _stored(self, info: zipfile.ZipInfo) -> memoryview:
        head = self._data[info.header_offset : info.header_offset + 30]
        before = 30 + sum(int.from_bytes(head[i : i + 2], "little") for i in (26, 28))
        start = info.header_offset + before
        content = memoryview(self._data)[start : start + info.file_size]
        if not head.startswith(BEGIN) or len(content) != info.file_size:
            raise ValueError(f"record {info.filename} is truncated")
        if zlib.crc32(content) != info.CRC:
            raise ValueError(f"record {info.filename} does not match its checksum")
        return content


MAX_AXES = 64
"""Of a tensor: PyTorch has no more."""

MAX_GROWTH = 4
"""How many times larger than its tensor a compressed storage may be; PyTorch compresses none."""

MAX_PROGRAM_B = 1 << 26
"""Size of a pickle in a compressed record."""

MAGIC = 0x1950A86A20F9469CFC6C
"""First object of a file of PyTorch before version 1.6."""

UNTYPED = np.dtype("V1")
DTYPES = {
    "bool": np.dtype("bool"),
    "uint8": np.dtype("uint8"),
    "int8": np.dtype("int8"),
    "int16": np.dtype("int16"),
    "int32": np.dtype("int32"),
    "int64": np.dtype("int64"),
    "float16": np.dtype("float16"),
    "float32": np.dtype("float32"),
    "float64": np.dtype("float64"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "complex64": np.dtype("complex64"),
    "complex128": np.dtype("complex128"),
}
"""Types of elements by PyTorch's names."""

STORAGES = {
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "BFloat16Storage": "bfloat16",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
SHORT = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Types that are converted to float32."""


class Storage:
    """Elements of one type in a file."""

    def __init__(self, file: _File, identifier: Any) -> None:
        what, dtype, key, _, size, *view = identifier
        if _text(what) != "storage" or not isinstance(dtype, np.dtype) or any(view):
            raise ValueError("an object outside the pickle that is not a storage")
        if not isinstance(key, str | bytes) or type(size) is not int or size < 0:
            raise ValueError("a storage without a name and a size")
        self.file, self.dtype, self.key, self.size = file, dtype, _text(key), size


class Tensor:
    """A tensor in a file.

    Attributes
    ----------
    shape : tuple of int
    problem : str
        Why its values cannot be read; empty if they can.
    """

    def __init__(
        self,
        storage: Storage | None,
        offset: int = 0,
        shape: Shape = (),
        strides: Shape = (),
        *others: Any,
        dtype: np.dtype | None = None,
        problem: str = "",
    ) -> None:
        self.shape, self.problem, self._strides = shape, problem, strides
        if problem:
            return
        if not isinstance(storage, Storage):
            raise ValueError("a tensor without a storage")
        self._storage, self._offset, self._dtype = storage, offset, dtype or storage.dtype
        numbers = (offset, *_sizes(shape), *_sizes(strides))
        if len(shape) != len(strides) or not all(
            type(n) is int and 0 <= n < 1 << 63 for n in numbers
        ):
            raise ValueError("a tensor whose shape and strides are not whole numbers")
        last = offset + sum((n - 1) * by for n, by in zip(shape, strides, strict=True))
        limit = storage.size * storage.dtype.itemsize
        if prod(shape) and (last + 1) * self._dtype.itemsize > limit:
            raise ValueError("a tensor that is larger than its storage")
        if len(others) > 2 and others[2]:
            self.problem = "has values that are computed when it is read"

    def read(self) -> np.ndarray:
        """Return the values, of at least 32 bits if they are floating-point numbers.

        Raises
        ------
        ValueError
            If the file is damaged.
        """
        dtype, storage = self._dtype, self._storage
        size = prod(self.shape) * dtype.itemsize
        if size == 0:
            return np.zeros(self.shape, dtype)
        stored = storage.file.content(storage, MAX_GROWTH * size)
        strides = [by * dtype.itemsize for by in self._strides]
        source = dtype if storage.file.little else dtype.newbyteorder(">")
        array: np.ndarray = np.ndarray(
            self.shape, source, stored, self._offset * dtype.itemsize, strides
        )
        return array.astype(np.float32 if dtype.name in SHORT else dtype, copy=False)


class _Ordered(dict[Any, Any]):
    """Replacement of ``collections.OrderedDict``, whose attributes are not read."""

    def __init__(self, *items: Any) -> None:
        super().__init__()
        for pairs in items:
            for name, value in pairs:
                if not isinstance(name, str | bytes):
                    raise ValueError("a key that is not a string")
                self[_text(name)] = value

    def __setstate__(self, state: object) -> None:
        pass


def _sizes(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, tuple) or len(sizes) > MAX_AXES:
        raise ValueError("a tensor whose shape is not a tuple")
    return sizes


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *others: Any) -> Tensor:
    return Tensor(storage, offset, shape, strides, *others)


def _typed(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    if not isinstance(dtype, np.dtype):
        raise ValueError("a tensor without a type")
    return Tensor(storage, offset, shape, strides, dtype=dtype)


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


def _of_class(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    """Return the tensor of which a subclass is a view."""
    if function not in REBUILD.values() or not isinstance(arguments, tuple):
        raise ValueError("a call of an object that is not a function")
    return function(*arguments)


def _meta(dtype: Any, shape: Any, *_: Any) -> Tensor:
    return Tensor(None, shape=_sizes(shape), problem="is on the device meta and has no values")


def _other(*_: Any) -> Tensor:
    return Tensor(None, problem="is a sparse or quantised tensor, not a dense one")


def _size(sizes: Any = ()) -> tuple[int, ...]:
    return _sizes(tuple(sizes))


def _device(*names: Any) -> None:
    return None


REBUILD: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor,
    "_rebuild_tensor_v3": _typed,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
    "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_sparse_tensor": _other,
    "_rebuild_sparse_csr_tensor": _other,
    "_rebuild_qtensor": _other,
    "_rebuild_nested_tensor": _other,
}
NAMES: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Ordered,
    **{("torch._utils", name): function for name, function in REBUILD.items()},
    ("torch._tensor", "_rebuild_from_type_v2"): _of_class,
    ("torch", "Tensor"): "Tensor",
    ("torch.nn.parameter", "Parameter"): "Parameter",
    ("torch.nn.parameter", "Buffer"): "Buffer",
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    **{("torch", name): DTYPES[dtype] for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): UNTYPED,
}
"""Replacements of the objects that the files refer to."""


class _File(Protocol):
    """Content of a file of either format."""

    little: bool

    def content(self, storage: Storage, limit: int) -> Buffer:
        """Return the bytes of a storage; decompressed ones are at most `limit`."""


def read_tensors(data: bytes) -> Any:
    """Return the object in a file of ``torch.save``, with a `Tensor` for each tensor.

    Raises
    ------
    ValueError
        If the file is damaged, or contains other objects than plain data and tensors.
    """
    try:
        return (_archive if data.startswith(BEGIN) else _legacy)(data)
    except Refused as error:
        raise ValueError(
            f"expected tensors, got a file that refers to {one_line(error)}; nothing was executed: "
            "save the state_dict() of the module"
        ) from None
    except DAMAGED as error:
        raise ValueError(
            f"expected a file of torch.save, got one that is damaged ({one_line(error)}); copy or "
            "download it again"
        ) from error


def _archive(data: bytes) -> Any:
    file = _Archive(data)
    return run_pickle(io.BytesIO(file.program), NAMES, lambda pid: Storage(file, pid))


class _Archive:
    """A zip archive with a pickle and the storages."""

    def __init__(self, data: bytes) -> None:
        self.archive = Archive(data)
        names = [name for name in self.archive.names if name.endswith("/data.pkl")]
        if len(names) != 1 or names[0].count("/") != 1:
            raise ValueError("it has no record data.pkl")
        self.folder = names[0].partition("/")[0]
        order = f"{self.folder}/byteorder"
        self.little = order not in self.archive.names or self.archive.record(order, 16) != b"big"
        self.program = self.archive.record(names[0], MAX_PROGRAM_B)

    def content(self, storage: Storage, limit: int) -> Buffer:
        record = self.archive.record(f"{self.folder}/data/{storage.key}", limit)
        if len(record) != storage.size * storage.dtype.itemsize:
            raise ValueError("a storage has another size than its record")
        return record


def _legacy(data: bytes) -> Any:
    file, stream = _Legacy(data), io.BytesIO(data)
    if run_pickle(stream, NAMES) != MAGIC:
        raise ValueError("it does not begin like one")
    run_pickle(stream, NAMES)  # the version of the format
    system = run_pickle(stream, NAMES)
    file.little = not isinstance(system, dict) or system.get("little_endian", True) is True
    storages: dict[str, Storage] = {}

    def persistent(identifier: Any) -> Storage:
        made = Storage(file, identifier)
        first = storages.setdefault(made.key, made)
        if (first.dtype, first.size) != (made.dtype, made.size):
            raise ValueError("a storage of two sizes")
        return first

    content = run_pickle(stream, NAMES, persistent)
    keys = run_pickle(stream, NAMES)
    if not isinstance(keys, list):
        raise ValueError("a list of storages is missing")
    position = stream.tell()
    for key in keys:
        storage = storages.get(_text(key)) if isinstance(key, str | bytes) else None
        if storage is None:
            raise ValueError("a storage that no tensor has")
        size = storage.size * storage.dtype.itemsize
        end = position + 8 + size
        count = int.from_bytes(data[position : position + 8], "little" if file.little else "big")
        if count != storage.size or end > len(data):
            raise ValueError("it is truncated")
        file.places[storage.key] = slice(position + 8, end)
        position = end
    return content


class _Legacy:
    """Pickles followed by the storages."""

    def __init__(self, data: bytes) -> None:
        self.data, self.little = data, True
        self.places: dict[str, slice] = {}

    def content(self, storage: Storage, limit: int) -> Buffer:
        place = self.places.get(storage.key)
        if place is None:
            raise ValueError("a storage is missing")
        return memoryview(self.data)[place]


def _text(value: Any) -> Any:
    return value.decode("latin1") if isinstance(value, bytes) else value


SAFETENSORS = ".safetensors"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of the files of ``torch.save``, which `torch` writes."""

NESTED = ("state_dict", "model_state_dict", "model")
"""Entries of checkpoints that contain the state dict."""

PARALLEL = "module."
"""Prefix of all names in a state dict of DataParallel or DistributedDataParallel."""


def read_state_dict(who: str, source: str | Path | Mapping[str, Any]) -> dict[str, Stored]:
    """Return the arrays of a state dict in the order of their definition, without their values.

    Parameters
    ----------
    who : str
        First word of error messages.
    source : str, Path or mapping
        A file in one of the two formats, or tensors or arrays by name. The order of definition is
        not known for safetensors, whose names are sorted, with numbers by value.

    Raises
    ------
    OSError
        If there is no such file, or it cannot be read.
    ValueError
        If the file is damaged, or contains objects other than tensors.
    """
    if isinstance(source, Mapping):
        return _arrays(who, source)
    path, data = Path(source), read_file(who, source)
    if path.suffix == SAFETENSORS:
        try:
            arrays = decode(data)
        except ValueError as error:
            raise ValueError(f"{who}: {path}: {error}") from error
        return _arrays(f"{who}: {path}", {n: arrays[n] for n in sorted(arrays, key=_numbered)})
    if path.suffix not in PICKLED:
        raise ValueError(f"{who}: expected {_suffixes()}, got {path}")
    try:
        content = read_tensors(data)
    except ValueError as error:
        raise ValueError(f"{who}: {path}: {error}; nothing of it was loaded") from error
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{who}: {path}: expected tensors by name, got {type(content).__name__}; save the "
            "state_dict() of the module"
        )
    return _arrays(f"{who}: {path}", content)


def series_of(
    source: str | Path | Mapping[str, Any], arrays: Mapping[str, Stored]
) -> dict[str, str]:
    """Return the series of layers whose order is known; one if it is that of the definition.

    Names in safetensors are sorted: the order is known of layers that differ in a number.
    """
    if isinstance(source, Mapping) or Path(source).suffix != SAFETENSORS:
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


def _arrays(where: str, entries: Mapping[str, Any]) -> dict[str, Stored]:
    """Convert the tensors of a state dict, which may be an entry of a checkpoint."""
    for name in NESTED:
        if isinstance(entries.get(name), Mapping):
            entries = entries[name]
            break
    arrays: dict[str, Stored] = {}
    for name, value in entries.items():
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
        raise ValueError(f"{where}: expected tensors by name, got none")
    return _without_prefix(arrays)


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
        return value
    try:
        if isinstance(value, Tensor):
            return value.read()
        value = value.detach().cpu().resolve_conj().resolve_neg()
        if value.is_floating_point() and value.element_size() < 4:
            value = value.float()  # NumPy has no bfloat16 of its own
        return np.asarray(value.numpy())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: its values cannot be read ({error})") from error


def _without_prefix(arrays: dict[str, Stored]) -> dict[str, Stored]:
    if not all(name.startswith(PARALLEL) for name in arrays):
        return arrays
    return {name.removeprefix(PARALLEL): array for name, array in arrays.items()}


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "layer.10" behind "layer.9"."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _suffixes() -> str:
    return f"a state dict in a file {some([SAFETENSORS, *PICKLED])}"
