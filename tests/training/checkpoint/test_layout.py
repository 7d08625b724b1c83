"""The files of the arrays of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pydtnn.comm import Serial
from pydtnn.model.pieces import full_piece
from pydtnn.training.checkpoint import layout as module
from pydtnn.training.checkpoint import saving
from pydtnn.training.checkpoint.assembly import assemble, create_plan
from pydtnn.training.checkpoint.folder import begin_checkpoint, partial_path
from pydtnn.training.checkpoint.layout import Described, Layout, arrange, read_layout
from pydtnn.training.checkpoint.saving import Writer
from tests.each import each

ARRAYS: dict[str, np.ndarray] = {
    "b.w": np.arange(40.0).reshape(8, 5),
    "a.w": np.arange(3.0),
    "half": np.arange(7, dtype="float16"),
    "none": np.zeros((0, 3), "float32"),
    "number": np.array(4),
    "flags": np.array([True, False]),
}


def described(arrays: dict[str, np.ndarray]) -> dict[str, Described]:
    return {name: Described(a.dtype.name, a.shape) for name, a in arrays.items()}


def begin(path: Path, layout: Layout, arrays: dict[str, np.ndarray], later: bool) -> Writer:
    """Write arrays as a checkpoint does, to a folder that is not in its place yet."""
    begin_checkpoint(path)
    pieces = {piece.region: piece for piece in (full_piece(n, a) for n, a in arrays.items())}
    writer = Writer(path, layout.files, later=later)
    assemble(Serial(), create_plan(layout, {key: [0] for key in pieces}, [0], 1), pieces, writer)
    writer.complete()
    assert writer.error is None
    return writer


def test_files_are_complete_before_they_are_flushed(tmp_path, monkeypatch):
    """So that training can change the arrays, of which there is no copy."""
    flushed: list[str] = []
    monkeypatch.setattr(saving, "_flush", lambda stream: flushed.append(Path(stream.name).name))
    monkeypatch.setattr(module, "FILE_BYTES", 100)
    layout, array = arrange({"x": Described("float64", (40,))}), np.arange(40.0)
    writer = begin(tmp_path / "x", layout, {"x": array}, later=True)
    array[...] = -1
    parts = [load_file(partial_path(tmp_path / "x") / file.name) for file in layout.files]
    values = [value for part in parts for value in part.values()]
    np.testing.assert_array_equal(np.concatenate(values), np.arange(40.0))
    assert (flushed, writer.error) == ([], None)
    writer.flush()
    assert (sorted(flushed), writer.error) == ([file.name for file in layout.files], None)


@pytest.fixture(params=[100, 1 << 20], ids=["several files", "one file"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Layout:
    monkeypatch.setattr(module, "FILE_BYTES", request.param)
    return arrange(described(ARRAYS))


def test_other_programs_read_every_array_and_we_the_layout(layout, tmp_path):
    begin(tmp_path / "x", layout, ARRAYS, later=False)
    folder, found = partial_path(tmp_path / "x"), {}
    for file in layout.files:
        found |= load_file(folder / file.name)
    for name, array in ARRAYS.items():
        if name not in layout.split:
            np.testing.assert_array_equal(found[name], array, strict=True)
    parts = [value for name, value in found.items() if name.startswith("b.w[")]
    if parts:
        assert layout.split == {"b.w": [8, 5]}
        np.testing.assert_array_equal(np.concatenate(parts), ARRAYS["b.w"].reshape(-1))
    names = [file.name for file in layout.files]
    assert read_layout(folder, names, ARRAYS, layout.split) == layout
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sizes == {file.name: file.size for file in layout.files}


def test_files_have_equal_lengths_of_which_there_are_not_too_many(monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 8)
    monkeypatch.setattr(module, "MAX_FILES", 4)
    layout = arrange({"x": Described("float32", (50,)), "y": Described("float32", (3,))})
    files = layout.files
    assert [file.size - len(file.header) for file in files] == [64, 64, 64, 20]
    assert all(len(file.header) % 8 == 0 for file in files)
    pieces = full_piece("x", np.zeros(50, "float32")), full_piece("y", np.zeros(3, "float32"))
    holders = {piece.region: [0, 1, 2] for piece in pieces}
    assert create_plan(layout, holders, [0, 1, 2], 3).writers == (0, 1, 2, 0)
    assert create_plan(layout, holders, [2, 1], 3).writers == (1, 2, 1, 2)


def test_wider_elements_come_first_so_that_all_are_aligned():
    (file,) = arrange(described(ARRAYS)).files
    for segment in file.segments:
        assert segment.offset % ARRAYS[segment.array].dtype.itemsize == 0
    names = [segment.array for segment in file.segments]
    assert names == ["a.w", "b.w", "number", "none", "half", "flags"]
    with pytest.raises(TypeError, match="checkpoint: z must have elements such as float32, got c"):
        arrange({"z": Described("complex128", (2,))})


def header(entries: object, data: bytes = b"12345678") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@each(
    ("data", "reason"),
    [
        (b"", "not a safetensors file"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        (header([X]), "not a safetensors file"),
        (header({"x": X | {"shape": [1 << 61, 8]}}), "wrong length of x"),
        (header({"x": X | {"shape": [-2, -1]}}), "invalid numbers of x"),
        (header({"x": X | {"shape": [1] * 99 + [2]}}), "invalid numbers of x"),
        (header({"x": X | {"dtype": "F4"}}), "not a safetensors file"),
        (header({"x": {"dtype": "F32", "shape": [2]}}), "not a safetensors file"),
        (header({"x": X | {"data_offsets": [8, 16]}}), "must follow the array"),
        (header({"x": X, "y": X}), "y must follow the array before it"),
        (header({"x": X}, b"1234567890"), "must have .* B by its header"),
        (header({"x": X | {"shape": ["2"]}}), "invalid numbers of x"),
        (header({"w[0:2]": X}), "the array w is not complete"),
        (header({"w[0:3]": X}), r"w\[0:3\] must have 3 elements"),
    ],
)
def test_hostile_headers_are_refused_before_memory_is_allocated(data, reason, tmp_path):
    (tmp_path / "arrays.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=reason):
        read_layout(tmp_path, ["arrays.safetensors"], {"x", "y", "w"}, {"w": [3]})
