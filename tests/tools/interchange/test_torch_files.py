"""Files of ``torch.save``, written here by hand: what they declare and what they contain."""

from __future__ import annotations

import contextlib
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, Sequential
from pydtnn.model import Model
from pydtnn.saving.weights import encode
from pydtnn.tools.interchange import load_state_dict, state_dict
from tests.each import each

STORAGES = {
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "int64": "LongStorage",
}


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def pair(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key: str, kind: str, size: int, *view: bytes) -> bytes:
    parts = text("storage"), b"ctorch\n" + kind.encode() + b"\n", text(key), text("cpu")
    return b"(" + b"".join(parts) + number(size) + b"".join(view) + b"tQ"


def tensor(of: bytes, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    arguments = (
        of + number(offset) + pair(shape) + pair(strides) + b"\x89ccollections\nOrderedDict\n)R"
    )
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def strides_of(array: np.ndarray) -> tuple[int, ...]:
    return tuple(step // array.itemsize for step in array.strides)


def entry(key: str, array: np.ndarray, *view: bytes) -> bytes:
    of = storage(key, STORAGES[array.dtype.name], array.size, *view)
    return tensor(of, array.shape, strides_of(array))


def mapping(entries: Mapping[str, bytes]) -> bytes:
    """The program of an ordered dictionary, as `Module.state_dict` returns it."""
    items = b"".join(text(name) + value for name, value in entries.items())
    metadata = b"}(" + text("_metadata") + b"}u"
    return b"ccollections\nOrderedDict\n)R(" + items + b"u" + metadata + b"b"


def archive(
    path: Path, program: bytes, records: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("net/data.pkl", b"\x80\x02" + program + b".")
        file.writestr("net/byteorder", "little")
        for key, content in records.items():
            file.writestr(f"net/data/{key}", content)
    return path


def save(path: Path, arrays: Mapping[str, np.ndarray], compression: int = 0) -> Path:
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    keys = {name: str(i) for i, name in enumerate(arrays)}
    program = mapping({name: entry(keys[name], array) for name, array in arrays.items()})
    records = {keys[name]: array.tobytes() for name, array in arrays.items()}
    return archive(path, program, records, compression)


def save_before_1_6(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    keys = {name: str(i) for i, name in enumerate(arrays)}
    program = mapping({name: entry(keys[name], array, b"N") for name, array in arrays.items()})
    magic = b"\x8a\x0a" + 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
    listed = b"](" + b"".join(map(text, keys.values())) + b"e"
    pickles = magic, b"M\xe9\x03", b"}(" + text("little_endian") + b"\x88u", program, listed
    storages = (struct.pack("<q", a.size) + a.tobytes() for a in arrays.values())
    path.write_bytes(b"".join(b"\x80\x02" + part + b"." for part in pickles) + b"".join(storages))
    return path


def model(seed: int = 0) -> Model:
    net = Sequential(Conv2d(4, 3), BatchNorm(), Flatten(), Linear(5))
    made = Model(net, (5, 6, 3), seed=seed)
    made.statistics.running[:] = np.float32(1 + seed)
    return made


def compress(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    return save(path, arrays, zipfile.ZIP_DEFLATED)


@each("write", [save, save_before_1_6, compress])
@each("dtype", ["float16", "float32", "float64"])
def test_all_formats_are_read_without_pytorch(write, dtype, tmp_path):
    arrays = {
        name: array if array.dtype == "int64" else array.astype(dtype)
        for name, array in state_dict(model(1)).items()
    }
    ours = model()
    load_state_dict(ours, write(tmp_path / "net.pt", arrays))
    for name, array in state_dict(ours).items():
        np.testing.assert_array_equal(array, arrays[name].astype(array.dtype))


def test_views_of_one_storage_are_read(tmp_path):
    values = np.arange(12, dtype="float32")
    of = storage("0", "FloatStorage", 12)
    program = mapping({"weight": tensor(of, (2, 3), (1, 2), 4), "bias": tensor(of, (2,), (0,), 3)})
    ours = Model(Linear(2), (3,))
    load_state_dict(ours, archive(tmp_path / "net.pt", program, {"0": values.tobytes()}))
    np.testing.assert_array_equal(ours.state()["linear.w"], [[4, 6, 8], [5, 7, 9]])
    np.testing.assert_array_equal(ours.state()["linear.b"], [3, 3])


def meta(shape: tuple[int, ...]) -> bytes:
    arguments = b"ctorch\nfloat32\n" + pair(shape) + pair(shape) + b"\x89"
    return b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n(" + arguments + b"tR"


FLOAT = np.zeros(4, "f4").tobytes()
FOUR = storage("0", "FloatStorage", 4)
DAMAGED = "expected a file of torch.save, got one that is damaged ("
HOSTILE: dict[str, tuple[bytes, Mapping[str, bytes], str]] = {
    "expanded": (
        mapping({"weight": tensor(FOUR, (1 << 33,), (0,))}),
        {"0": FLOAT},
        "arrays do not fit the model (matched by names): weight has shape (8589934592,) instead",
    ),
    "larger than its storage": (
        mapping({"weight": tensor(FOUR, (2, 3), (3, 1))}),
        {"0": FLOAT},
        f"{DAMAGED}a tensor that is larger than its storage)",
    ),
    "a record that is missing": (
        mapping({"weight": tensor(storage("1", "FloatStorage", 6), (2, 3), (3, 1))}),
        {"0": FLOAT},
        "weight: its values cannot be read (record net/data/1 is missing)",
    ),
    "meta": (
        mapping({"weight": meta((2, 3))}),
        {},
        "expected dense tensors with values, but weight is on the device meta and has no values",
    ),
    "sparse": (
        mapping({"weight": b"ctorch._utils\n_rebuild_sparse_tensor\n(" + b"tR"}),
        {},
        "expected dense tensors with values, but weight is a sparse or quantised tensor, not a de",
    ),
    "a function": (
        mapping({"weight": b"cos\nsystem\n(" + text("true") + b"tR"}),
        {},
        "expected tensors, got a file that refers to os.system; nothing was executed",
    ),
    "nested tuples as a name": (
        b"}(" + b")" + b"\x85" * 50_000 + b"K\x01u",
        {},
        f"{DAMAGED}a key that is not a string but of type tuple)",
    ),
    "numbers as names": (b"}(K\x01K\x01u", {}, "expected tensors by name, got int for 1; save"),
}


@each(("kind", "strict"), [*((kind, True) for kind in HOSTILE), ("expanded", False)])
def test_hostile_files_are_refused_in_a_sentence_and_without_memory(kind, strict, tmp_path):
    program, records, message = HOSTILE[kind]
    path = archive(tmp_path / "net.pt", program, records)
    ours = Model(Linear(2, bias=False), (3,))
    before = encode(ours.state())
    if not strict:
        message = message.replace("arrays do not fit", "no array fits")
    tracemalloc.start()
    with pytest.raises(ValueError, match="^" + re.escape(f"load_state_dict: {path}: {message}")):
        load_state_dict(ours, path, strict=strict)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
    assert encode(ours.state()) == before


@each("read", [True, False])
def test_records_that_become_large_are_refused_without_memory(read, tmp_path):
    """Those that nothing refers to are not read."""
    size = 5 << 20
    of = storage("0", "FloatStorage", size // 4 if read else 6)
    program = mapping({"weight": tensor(of, (2, 3), (3, 1))})
    records = {"0": bytes(size if read else 24), "1": bytes(size)}
    path = archive(tmp_path / "net.pt", program, records, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 18
    ours = Model(Linear(2, bias=False), (3,))
    refused = pytest.raises(ValueError, match=r"is compressed and would become \d+ B, more than")
    tracemalloc.start()
    with refused if read else contextlib.nullcontext():
        load_state_dict(ours, path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_changed_byte_of_an_archive_is_found(tmp_path):
    arrays = state_dict(model(1))
    path, ours = save(tmp_path / "net.pt", arrays), model()
    data = bytearray(path.read_bytes())
    data[data.index(arrays["conv2d0.weight"].tobytes()) + 10] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="record net/data/0 does not match its checksum"):
        load_state_dict(ours, path)
