"""Tensors in the files of ``torch.save``, read without PyTorch and without executing anything.

A file is a zip archive with a pickle and a record for each storage of tensors, or, as PyTorch wrote
it before version 1.6, pickles followed by the storages. The pickle is interpreted by `unpickle`: it
can only create dictionaries, lists, numbers, strings and the objects of this module; other objects,
such as those of a training script beside the tensors, are skipped. A tensor is a shape, strides and
a storage, which need not agree with each other: a file of 1 KB may declare 2^33 elements with
strides of 0. Values are therefore not read before the shape of the tensor is known to be that of an
array of the model.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Protocol

import numpy as np

from pydtnn.layers.base import Shape
from pydtnn.saving.weights import MAX_AXES, SHORT, TYPES
from pydtnn.tools.interchange.archives import BEGIN, Archive, Buffer
from pydtnn.tools.interchange.unpickle import (
    DAMAGED,
    Lenient,
    PickledDict,
    Skipped,
    UnsafePickle,
    one_line,
    run_pickle,
)
from pydtnn.utils.errors import printable

MAX_GROWTH = 4
"""How many times larger than its tensor a compressed storage may be; PyTorch compresses none."""

MAX_PROGRAM_B = 1 << 26
"""Size of a pickle in a compressed record."""

MAGIC = 0x1950A86A20F9469CFC6C
"""First object of a file of PyTorch before version 1.6."""

UNTYPED = np.dtype("V1")
DTYPES = {dtype.name: dtype for dtype in (*TYPES.values(), np.dtype("complex128"))}
"""Types of elements by PyTorch's names, which are those of NumPy."""

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


class TorchStorage:
    """Elements of one type in a file."""

    def __init__(self, file: _File, identifier: Any) -> None:
        what, dtype, key, _, size, *view = identifier
        if isinstance(dtype, Skipped):
            raise UnsafePickle(dtype.name)
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
        storage: TorchStorage | None,
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
        if not isinstance(storage, TorchStorage):
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


class _Ordered(PickledDict):
    """Replacement of ``collections.OrderedDict``, whose attributes are not read."""

    def __init__(self, *items: Any) -> None:
        super().__init__()
        for pairs in items:
            for name, value in pairs:
                self[name] = value

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
        return Tensor(None, problem="has elements of an unknown type")
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
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    **{("torch", name): DTYPES[dtype] for name, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): UNTYPED,
}
"""Replacements of the objects that the files refer to."""


class _File(Protocol):
    """Content of a file of either format."""

    little: bool

    def content(self, storage: TorchStorage, limit: int) -> Buffer:
        """Return the bytes of a storage; decompressed ones are at most `limit`."""


def read_tensors(data: bytes) -> tuple[Any, list[str]]:
    """Return the object in a file of ``torch.save``, with a `Tensor` for each tensor.

    Returns
    -------
    content : object
    skipped : list of str
        Names of the classes and functions whose objects are not read.

    Raises
    ------
    ValueError
        If the file is damaged, or is itself an object other than plain data and tensors.
    """
    names = Lenient(NAMES)
    try:
        content = (_archive if data.startswith(BEGIN) else _legacy)(data, names)
        if isinstance(content, Skipped):
            raise UnsafePickle(content.name)
        skipped = [value.name for value in names.values() if isinstance(value, Skipped)]
        return content, [printable(name)[:80] for name in skipped]
    except UnsafePickle as error:
        raise ValueError(refers_to(one_line(error))) from None
    except DAMAGED as error:
        raise ValueError(
            f"expected a file of torch.save, got one that is damaged ({one_line(error)}); copy or "
            "download it again"
        ) from error


def refers_to(name: str) -> str:
    """Return the message for a file that contains another object instead of tensors."""
    return (
        f"expected tensors, got a file that refers to {name}; nothing was executed: save the "
        "state_dict() of the module"
    )


def _archive(data: bytes, names: Lenient) -> Any:
    file = _TorchArchive(data)
    return run_pickle(io.BytesIO(file.program), names, lambda pid: TorchStorage(file, pid))


class _TorchArchive:
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

    def content(self, storage: TorchStorage, limit: int) -> Buffer:
        record = self.archive.record(f"{self.folder}/data/{storage.key}", limit)
        if len(record) != storage.size * storage.dtype.itemsize:
            raise ValueError("a storage has another size than its record")
        return record


def _legacy(data: bytes, names: Lenient) -> Any:
    file, stream = _Legacy(data), io.BytesIO(data)
    if run_pickle(stream, NAMES) != MAGIC:
        raise ValueError("it does not begin like one")
    run_pickle(stream, NAMES)  # the version of the format
    system = run_pickle(stream, NAMES)
    file.little = not isinstance(system, dict) or system.get("little_endian", True) is True
    storages: dict[str, TorchStorage] = {}

    def persistent(identifier: Any) -> TorchStorage:
        made = TorchStorage(file, identifier)
        first = storages.setdefault(made.key, made)
        if (first.dtype, first.size) != (made.dtype, made.size):
            raise ValueError("a storage of two sizes")
        return first

    content = run_pickle(stream, names, persistent)
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

    def content(self, storage: TorchStorage, limit: int) -> Buffer:
        place = self.places.get(storage.key)
        if place is None:
            raise ValueError("a storage is missing")
        return memoryview(self.data)[place]


def _text(value: Any) -> Any:
    return value.decode("latin1") if isinstance(value, bytes) else value
