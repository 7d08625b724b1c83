"""Weights in safetensors files."""

from __future__ import annotations

import errno
import math
import re
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from pydtnn.callbacks import BestWeights
from pydtnn.layers import BatchNorm, Conv2d, Dropout, Flatten, Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.saving.weights import decode, encode, load_weights, renamed, save_weights
from pydtnn.utils import files
from pydtnn.utils.version import __version__
from tests.each import each
from tests.small_training import small_fit, small_model, small_trainer


def test_weights_come_back_bit_for_bit(tmp_path):
    model, other = small_model(seed=0), small_model(seed=1)
    model.statistics.running[:] = np.random.default_rng(0).random(len(model.statistics.running))
    save_weights(model, tmp_path / "w.safetensors")
    load_weights(other, tmp_path / "w.safetensors")
    assert encode(other.state()) == encode(model.state())
    save_weights(other, tmp_path / "new" / "folder" / "w.safetensors")
    assert len({path.read_bytes() for path in tmp_path.rglob("*.safetensors")}) == 1


def test_the_file_names_arrays_as_the_model_does_and_tells_the_version(tmp_path):
    model = small_model()
    save_weights(model, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "numpy") as file:
        assert set(file.keys()) == set(model.state())
        (entry,) = file.metadata().items()
        assert entry[0] == "pydtnn"
        assert re.fullmatch(rf"{re.escape(__version__)} sha256:[0-9a-f]{{64}}", entry[1])


def test_places_that_cannot_be_read_or_written_are_told_in_a_sentence(tmp_path):
    path, model = tmp_path / "none.safetensors", small_model()
    with pytest.raises(FileNotFoundError, match=f"^load_weights: file {path} does not exist$"):
        load_weights(model, path)
    with pytest.raises(OSError, match=r"^load_weights: cannot read .*: is a directory$"):
        load_weights(model, tmp_path)
    path.write_text("")
    with pytest.raises(OSError, match=r"^save_weights: cannot write .*; choose another folder$"):
        save_weights(model, path / "w.safetensors")


def test_weights_that_do_not_fit_are_refused_with_names_and_shapes(tmp_path):
    path = tmp_path / "w.safetensors"
    state = small_model(filters=6).state()
    state["tail.w"] = state.pop("head.b")
    path.write_bytes(encode(state))
    with pytest.raises(ValueError, match="weights do not fit the model") as caught:
        load_weights(small_model(), path)
    for part in (str(path), "head.b is missing", "tail.w is unknown", "conv2d0.w has shape (6, 3,"):
        assert part in str(caught.value)


def test_a_full_disk_leaves_the_old_weights_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    save_weights(small_model(), path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(
        OSError, match=f"^save_weights: cannot write {path}: no space left on device; free some"
    ):
        save_weights(small_model(seed=1), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_those_of_the_library_and_its_files_are_read():
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64", "float16", "int64", "uint8", "bool"):
        shapes = {"b": (3, 2), "a.x": (5,), "c": (), "d": (0, 4), "e": (1, 7)}
        arrays = {name: (9 * rng.random(shapes[name])).astype(dtype) for name in shapes}
        arrays["t"] = np.asfortranarray(arrays["b"]).T
        in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        data = save(in_order, metadata={"pydtnn": "x"})
        assert encode(arrays, "x") == data
        swapped = {n: a.astype(a.dtype.newbyteorder(">")) for n, a in arrays.items()}
        assert encode(swapped, "x") == data
        for name, array in decode(data).items():
            np.testing.assert_array_equal(array, arrays[name])
        assert load(data).keys() == decode(data).keys()


@each(
    "header",
    [
        *("[]", '{"a": 3}', '{"a": {}}', "{", "9" * 5000, "[" * 100000),
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        '{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 4]}}',
    ],
)
def test_headers_of_others_are_checked(header):
    text = header.encode()
    for length in (len(text), len(text) + 1, len(text) + 5, 1 << 60):
        with pytest.raises(ValueError, match="not a safetensors file, or truncated"):
            decode(length.to_bytes(8, "little") + text + bytes(4))


def test_without_memory_for_the_best_weights_training_continues(tmp_path, monkeypatch, caplog):
    def lacks(*given: object) -> bytes:
        raise MemoryError("Unable to allocate 64 MiB")

    monkeypatch.setattr("pydtnn.saving.weights.encode_header", lacks)
    trainer = small_trainer(None, BestWeights(tmp_path / "best.safetensors", "loss"))
    small_fit(trainer)
    assert trainer.epoch > 0
    assert (
        "there is not enough memory: Unable to allocate 64 MiB; training continues" in caplog.text
    )


@each("strict", [True, False])
@each(
    ("name", "value", "words"),
    [
        ("head.w", math.nan, "head.w must be finite, got nan"),
        ("head.b", 1e300, "head.b must be in the range of float32, got 1e"),
        ("batchnorm1.running_mean", 1e39, "running_mean must be in the range of float32, got 1e"),
        ("batchnorm1.running_variance", -0.5, "running_variance must be at least 0, got -0.5"),
        ("head.w", np.int64, "head.w must contain floating-point numbers, .* got int64"),
    ],
)
def test_numbers_that_cannot_be_weights_are_refused_by_name_and_the_model_stays(
    name, value, words, strict, tmp_path
):
    path, state = tmp_path / "w.safetensors", small_model().state()
    if isinstance(value, type):
        state[name] = state[name].astype(value)
    else:
        state[name].flat[0] = value
    path.write_bytes(encode(state))
    model = small_model(seed=1, dtype="float32")
    before = encode(model.state())
    with pytest.raises(ValueError, match=f"^load_weights: {path}: .*({words})"):
        load_weights(model, path, strict=strict)
    assert encode(model.state()) == before


@each(
    ("change", "words"),
    [
        *((lambda data, n=n: data[:n], "^load_weights: .*or truncated") for n in (0, 5, -1)),
        (lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "match the checksum"),
        (lambda data: data.replace(b'"F64"', b'"F8X"'), "that NumPy supports, got F8X"),
    ],
)
def test_damage_is_found_and_the_model_stays(change, words, tmp_path):
    path, model = tmp_path / "w.safetensors", small_model(seed=1)
    save_weights(small_model(), path)
    path.write_bytes(change(path.read_bytes()))
    before = encode(model.state())
    with pytest.raises(ValueError, match=words):
        load_weights(model, path)
    assert encode(model.state()) == before


@each("dtype", ["float16", "float32", "float64"])
@each("metadata", [None, {"pydtnn": "0.4.0"}])
def test_files_of_any_floats_without_a_checksum_are_read(metadata, dtype, tmp_path):
    """Those of earlier versions and of other programs."""
    state = {name: array.astype(dtype) for name, array in small_model().state().items()}
    model = small_model(seed=1, dtype="float32")
    (tmp_path / "w.safetensors").write_bytes(save(state, metadata))
    load_weights(model, tmp_path / "w.safetensors")
    np.testing.assert_array_equal(model.state()["head.w"], state["head.w"].astype(np.float32))


def head_of(classes: int, **options: Any) -> Model:
    """The small model with another head."""
    net = Sequential(
        Conv2d(4, 3), BatchNorm(), ReLU(), Dropout(0.2), Flatten(), Linear(classes, name="head")
    )
    return Model(net, (5, 5, 2), backend="numpy", dtype="float64", **options)


def test_a_backbone_is_loaded_below_a_new_head(tmp_path):
    old, new = small_model(), head_of(7, seed=1)
    initial = {name: array.copy() for name, array in new.state().items()}
    state = {**old.state(), "batchnorm1.num_batches_tracked": np.array(3)}  # as of PyTorch
    del state["batchnorm1.beta"]
    (tmp_path / "w.safetensors").write_bytes(encode(state))
    report = load_weights(new, tmp_path / "w.safetensors", strict=False)
    other = head_of(7, seed=2)
    load_weights(other, tmp_path / "w.safetensors", strict=False)
    assert new.loaded != other.loaded  # the checksum that ranks compare is of all arrays
    assert report.mismatched == {"head.w": ((3, 36), (7, 36)), "head.b": ((3,), (7,))}
    assert report.missing == ("batchnorm1.beta",)
    assert report.unexpected == ("batchnorm1.num_batches_tracked",)
    for name, array in new.state().items():
        expected = old.state()[name] if name in report.loaded else initial[name]
        np.testing.assert_array_equal(array, expected)
    assert str(report).splitlines() == [
        f"loaded {len(initial) - 3} of {len(initial)} arrays",
        "  missing, not changed: batchnorm1.beta",
        "  other shape, not changed: head.w (3, 36) for (7, 36), head.b (3,) for (7,)",
        "  unexpected, not used: batchnorm1.num_batches_tracked",
    ]


def test_a_file_of_which_nothing_fits_is_refused_even_if_not_strict(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(encode({"a.w": np.ones(3)}))
    model = small_model()
    before = encode(model.state())
    with pytest.raises(ValueError, match=r"no array fits the model: .*head.w"):
        load_weights(model, tmp_path / "w.safetensors", strict=False)
    assert (encode(model.state()), model.loaded) == (before, None)


@each(
    ("prefix", "rename"),
    [
        ("net.", {"net": ""}),
        ("net.", lambda name: name.removeprefix("net.")),
        ("a.b.", {"c.d": "x", "a.b": ""}),
        ("", {"conv2d0": "conv2d0"}),
    ],
)
def test_arrays_get_the_names_of_the_model(prefix, rename, tmp_path):
    state = {prefix + name: array for name, array in small_model().state().items()}
    more = {"c.d.w": np.ones(1)} if "c.d" in str(rename) else {}
    (tmp_path / "w.safetensors").write_bytes(encode(state | more))
    model = small_model(seed=1)
    report = load_weights(model, tmp_path / "w.safetensors", rename=rename, strict=not more)
    assert set(report.loaded) == set(model.state())
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, state[prefix + name])


@each(
    ("rename", "words"),
    [
        ({"hed": "head"}, r"rename: 'hed' matches none of the arrays .*head.w"),
        ({"head.w": "head.b"}, "a name of its own, got head.b for head"),
        (lambda name: 3, r"rename must give \w+.\w+ a name or None, got 3"),
        ("head", "rename must be a mapping of names or a callable, got 'head'"),
        ({re.compile("h"): "x"}, "rename must have names as keys and values, got re.compile"),
    ],
)
def test_rules_that_give_no_names_are_refused(rename, words, tmp_path):
    save_weights(small_model(), tmp_path / "w.safetensors")
    model = small_model(seed=1)
    before = encode(model.state())
    with pytest.raises((TypeError, ValueError), match=f"^load_weights: .*{words}"):
        load_weights(model, tmp_path / "w.safetensors", rename=rename)
    assert encode(model.state()) == before


def test_a_prefix_is_added_and_names_of_several_digits_are_not_confused():
    arrays = {"block1.w": np.ones(2), "block10.w": np.zeros(2)}
    assert set(renamed(arrays, {"": "net"})) == {"net.block1.w", "net.block10.w"}
    assert set(renamed(arrays, {"block1": "first"})) == {"first.w", "block10.w"}
    assert set(renamed(arrays, {"block1.": "a.b.", "block10": None})) == {"a.b.w"}


def test_arrays_renamed_to_none_are_skipped(tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(small_model(), path)
    for rename in ({"head": None}, lambda name: None if name[:4] == "head" else name):
        report = load_weights(head_of(7), path, strict=False, rename=rename)
        assert report.missing == ("head.w", "head.b")
        assert not report.mismatched
    with pytest.raises(ValueError, match=r"head.w is missing, head.b is missing$"):
        load_weights(head_of(7), path, rename=rename)
