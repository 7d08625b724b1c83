"""Weights in safetensors files."""

from __future__ import annotations

import errno
import hashlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from pydtnn import __version__
from pydtnn.callbacks import BestWeights
from pydtnn.layers import BatchNorm, Conv2d, Dropout, Flatten, Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.saving.weights import decode, encode, load_weights, renamed, save_weights
from pydtnn.utils import files
from tests.each import each
from tests.small_training import small_fit, small_model, small_trainer


def test_weights_come_back_bit_for_bit(tmp_path: Path) -> None:
    model, other = small_model(seed=0), small_model(seed=1)
    model.statistics.running[:] = np.random.default_rng(0).random(len(model.statistics.running))
    save_weights(model, tmp_path / "w.safetensors")
    load_weights(other, tmp_path / "w.safetensors")
    for name, value in model.state().items():
        np.testing.assert_array_equal(other.state()[name], value)


def test_the_file_names_arrays_as_the_model_does_and_tells_the_version(tmp_path: Path) -> None:
    model = small_model()
    save_weights(model, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "numpy") as file:
        assert set(file.keys()) == set(model.state())
        (entry,) = file.metadata().items()
        assert entry[0] == "pydtnn"
        assert re.fullmatch(rf"{re.escape(__version__)} sha256:[0-9a-f]{{64}}", entry[1])


def test_the_same_weights_give_the_same_bytes_wherever_they_are_written(tmp_path: Path) -> None:
    digests = set()
    for path in (tmp_path / "a.safetensors", tmp_path / "new" / "folder" / "b.safetensors"):
        save_weights(small_model(), path)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_float64_weights_can_be_loaded_into_a_float32_model(tmp_path: Path) -> None:
    model, other = small_model(), small_model(seed=1, dtype="float32")
    save_weights(model, tmp_path / "w.safetensors")
    load_weights(other, tmp_path / "w.safetensors")
    w = model.state()["head.w"]
    np.testing.assert_array_equal(other.state()["head.w"], w.astype(np.float32))


def test_arrays_in_fortran_order_and_without_axes_are_encoded_by_value() -> None:
    arrays = {"f": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "s": np.array(7)}
    for name, array in decode(encode(arrays)).items():
        np.testing.assert_array_equal(array, arrays[name])
        assert array.shape == arrays[name].shape


def test_a_missing_file_is_told_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    with pytest.raises(FileNotFoundError, match=f"^load_weights: file {path} does not exist$"):
        load_weights(small_model(), path)


def test_a_folder_instead_of_a_file_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^load_weights: cannot read .*: is a directory$"):
        load_weights(small_model(), tmp_path)


@each("cut", [0, 5, 40, -1])
def test_a_file_that_is_cut_short_is_refused_and_the_model_stays(cut: int, tmp_path: Path) -> None:
    path, model = tmp_path / "w.safetensors", small_model(seed=1)
    path.write_bytes(encode(small_model().state())[:cut])
    before = encode(model.state())
    message = f"load_weights: {path}: not a safetensors file, or truncated ("
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        load_weights(model, path)
    assert encode(model.state()) == before


def test_weights_that_do_not_fit_are_refused_with_names_and_shapes(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    state = small_model(filters=6).state()
    state["tail.w"] = state.pop("head.b")
    path.write_bytes(encode(state))
    with pytest.raises(ValueError, match="weights do not fit the model") as caught:
        load_weights(small_model(), path)
    for part in (str(path), "head.b is missing", "tail.w is unknown", "conv2d0.w has shape (6, 3,"):
        assert part in str(caught.value)


def test_a_full_disk_leaves_the_old_weights_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_place_that_cannot_be_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"^save_weights: cannot write .*; choose another folder$"):
        save_weights(small_model(), tmp_path / "file" / "w.safetensors")


def test_elements_that_numpy_does_not_know_are_refused(tmp_path: Path) -> None:
    model = small_model(dtype="float32")
    data = encode(model.state()).replace(b'"F32"', b'"F8X"')
    (tmp_path / "w.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"that NumPy supports, got F8X; conv"):
        load_weights(model, tmp_path / "w.safetensors")


def test_files_are_those_of_the_library_and_its_files_are_read() -> None:
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64", "float16", "int64", "uint8", "bool"):
        arrays = {
            name: (9 * rng.random(shape)).astype(dtype)
            for name, shape in (
                ("b", (3, 2)),
                ("a.x", (5,)),
                ("c", ()),
                ("d", (0, 4)),
                ("e", (1, 7)),
            )
        }
        arrays["t"] = np.asfortranarray(arrays["b"]).T
        data = save(
            {name: np.asarray(array, order="C") for name, array in arrays.items()},
            metadata={"pydtnn": "x"},
        )
        assert encode(arrays, "x") == data
        swapped = {n: a.astype(a.dtype.newbyteorder(">")) for n, a in arrays.items()}
        assert encode(swapped, "x") == data
        for name, array in decode(data).items():
            np.testing.assert_array_equal(array, arrays[name])
        assert load(data).keys() == decode(data).keys()


@each(
    "header",
    [
        *("[]", '{"a": 3}', '{"a": {}}', "{", "9" * 5000, "[" * 100000, '{"a": null}'),
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        '{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}',
        '{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 4]}}',
    ],
)
def test_headers_of_others_are_checked(header: str) -> None:
    text = header.encode()
    for length in (len(text), len(text) + 1, len(text) + 5, 1 << 60):
        with pytest.raises(ValueError, match="not a safetensors file, or truncated"):
            decode(length.to_bytes(8, "little") + text + bytes(4))


def test_without_memory_for_the_best_weights_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lacks(*given: object) -> bytes:
        raise MemoryError("Unable to allocate 64 MiB")

    monkeypatch.setattr("pydtnn.saving.weights.encode_header", lacks)
    trainer = small_trainer(None, BestWeights(tmp_path / "best.safetensors", "loss"))
    small_fit(trainer)
    assert trainer.epoch > 0
    assert (
        "there is not enough memory: Unable to allocate 64 MiB; training continues" in caplog.text
    )


def replaced(name: str, change: Callable[[np.ndarray], np.ndarray], path: Path) -> Path:
    """A file of weights of float64 in which one array is another one; without a checksum."""
    state = small_model().state()
    path.write_bytes(encode(state | {name: change(state[name])}))
    return path


def first(value: complex) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.concatenate([[value], array.reshape(-1)[1:]]).reshape(array.shape)


@each(
    ("name", "change", "words"),
    [
        ("head.w", first(math.nan), "head.w must be finite, got nan"),
        ("conv2d0.w", first(-math.inf), "conv2d0.w must be finite, got -inf"),
        ("head.b", first(1e300), "head.b must be in the range of float32, got 1e+300"),
        (
            "head.w",
            lambda a: a.astype(np.int64),
            "head.w must contain floating-point numbers, such as float32, got int64",
        ),
        (
            "head.w",
            lambda a: a > 0,
            "head.w must contain floating-point numbers, such as float32, got bool",
        ),
        ("head.w", lambda a: a.astype(np.complex64), "not a safetensors file|got complex64"),
        (
            "batchnorm1.running_mean",
            first(1e39),
            "batchnorm1.running_mean must be in the range of float32, got 1e+39",
        ),
        (
            "batchnorm1.running_variance",
            first(-0.5),
            "running_variance must be at least 0, got -0.5",
        ),
    ],
)
def test_numbers_that_cannot_be_weights_are_refused_by_name_and_the_model_stays(
    name: str, change: Callable[[np.ndarray], np.ndarray], words: str, tmp_path: Path
) -> None:
    model = small_model(seed=1, dtype="float32")
    before = encode(model.state())
    path = replaced(name, change, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=f"^load_weights: {path}: ") as error:
        load_weights(model, path)
    assert any(part in str(error.value) for part in words.split("|"))
    assert encode(model.state()) == before


@each("dtype", ["float16", "float32", "float64"])
def test_floats_of_any_size_are_taken_where_they_fit(dtype: str, tmp_path: Path) -> None:
    state = {name: array.astype(dtype) for name, array in small_model().state().items()}
    (tmp_path / "w.safetensors").write_bytes(encode(state))
    model = small_model(seed=1, dtype="float32")
    load_weights(model, tmp_path / "w.safetensors")
    np.testing.assert_array_equal(model.state()["head.w"], state["head.w"].astype(np.float32))


def test_a_change_that_leaves_a_file_readable_is_found_by_its_checksum(tmp_path: Path) -> None:
    path, model = tmp_path / "w.safetensors", small_model(seed=1)
    save_weights(small_model(), path)
    data, before = bytearray(path.read_bytes()), encode(model.state())
    data[-3] ^= 1  # a digit of the last number, which stays finite
    path.write_bytes(data)
    with pytest.raises(ValueError, match="the weights do not match the checksum; the file is dam"):
        load_weights(model, path)
    assert encode(model.state()) == before


@each("metadata", [None, {"pydtnn": "0.4.0"}, {"format": "pt"}])
def test_files_without_a_checksum_are_read(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    """Those of earlier versions and of other programs."""
    model, other = small_model(), small_model(seed=1)
    (tmp_path / "w.safetensors").write_bytes(save(model.state(), metadata))
    load_weights(other, tmp_path / "w.safetensors")
    assert encode(other.state()) == encode(model.state())


@each("value", ["0.4.0 sha256:12", "0.4.0 sha25", "0.4.0 sha256:" + "g" * 64])
def test_a_damaged_checksum_is_not_taken_for_none(value: str, tmp_path: Path) -> None:
    model = small_model()
    (tmp_path / "w.safetensors").write_bytes(save(model.state(), {"pydtnn": value}))
    with pytest.raises(ValueError, match="do not match the checksum; the file is damaged"):
        load_weights(model, tmp_path / "w.safetensors")


def head_of(classes: int, **options: Any) -> Model:
    """The small model with another head."""
    net = Sequential(
        Conv2d(4, 3), BatchNorm(), ReLU(), Dropout(0.2), Flatten(), Linear(classes, name="head")
    )
    return Model(net, (5, 5, 2), backend="numpy", dtype="float64", **options)


def test_a_backbone_is_loaded_below_a_new_head(tmp_path: Path) -> None:
    old, new = small_model(), head_of(7, seed=1)
    initial = {name: array.copy() for name, array in new.state().items()}
    save_weights(old, tmp_path / "w.safetensors")
    report = load_weights(new, tmp_path / "w.safetensors", strict=False)
    assert report.mismatched == {"head.w": ((3, 36), (7, 36)), "head.b": ((3,), (7,))}
    assert (report.missing, report.unexpected) == ((), ())
    for name, array in new.state().items():
        expected = old.state()[name] if name in report.loaded else initial[name]
        np.testing.assert_array_equal(array, expected)
    assert str(report) == (
        f"loaded {len(initial) - 2} of {len(initial)} arrays\n"
        "  other shape, not changed: head.w (3, 36) for (7, 36), head.b (3,) for (7,)"
    )


def test_arrays_of_one_side_only_are_reported_and_never_checked_as_weights(tmp_path: Path) -> None:
    """PyTorch counts batches in an integer."""
    state = small_model().state()
    del state["head.b"]
    state["batchnorm1.num_batches_tracked"] = np.array(3)
    (tmp_path / "w.safetensors").write_bytes(encode(state))
    model = small_model(seed=1)
    report = load_weights(model, tmp_path / "w.safetensors", strict=False)
    assert report.missing == ("head.b",)
    assert report.unexpected == ("batchnorm1.num_batches_tracked",)
    assert "missing, not changed: head.b\n  unexpected, not used: batchnorm1.num" in str(report)
    np.testing.assert_array_equal(model.state()["head.w"], state["head.w"])


@each("strict", [True, False])
def test_numbers_that_are_loaded_are_checked_in_any_case(strict: bool, tmp_path: Path) -> None:
    path = replaced("head.w", first(math.nan), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="head.w must be finite, got nan"):
        load_weights(small_model(), path, strict=strict)


def test_a_file_of_which_nothing_fits_is_refused_even_if_not_strict(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(encode({"a.w": np.ones(3)}))
    model = small_model()
    before = encode(model.state())
    with pytest.raises(ValueError, match=r"no array fits the model: .*head.w"):
        load_weights(model, tmp_path / "w.safetensors", strict=False)
    assert (encode(model.state()), model.loaded) == (before, None)


def with_prefix(prefix: str) -> dict[str, np.ndarray]:
    return {prefix + name: array for name, array in small_model().state().items()}


@each(
    ("prefix", "rename"),
    [
        ("net.", {"net": ""}),
        ("net.", {"net.": ""}),
        ("net.", {re.compile(r"^net\."): ""}),
        ("net.", lambda name: name.removeprefix("net.")),
        ("a.b.", {"c.d": "x", "a.b": ""}),
        ("", {"conv2d0": "conv2d0"}),
    ],
)
def test_arrays_get_the_names_of_the_model(prefix: str, rename: Any, tmp_path: Path) -> None:
    state = with_prefix(prefix) | ({"c.d.w": np.ones(1)} if "c.d" in str(rename) else {})
    (tmp_path / "w.safetensors").write_bytes(encode(state))
    model = small_model(seed=1)
    report = load_weights(
        model, tmp_path / "w.safetensors", rename=rename, strict="c.d" not in str(rename)
    )
    assert set(report.loaded) == set(model.state())
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, state[prefix + name])


def test_a_prefix_is_added_and_names_of_several_digits_are_not_confused(tmp_path: Path) -> None:
    arrays = {"block1.w": np.ones(2), "block10.w": np.zeros(2)}
    assert set(renamed(arrays, {"": "net"})) == {"net.block1.w", "net.block10.w"}
    assert set(renamed(arrays, {"block1": "first"})) == {"first.w", "block10.w"}
    assert set(renamed(arrays, {re.compile(r"block(\d+)"): r"stage\1"})) == {
        "stage1.w",
        "stage10.w",
    }


@each("rename", [{"head": None}, lambda n: None if n[:4] == "head" else n])
def test_arrays_renamed_to_none_are_skipped(rename: Any, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(small_model(), path)
    report = load_weights(head_of(7), path, strict=False, rename=rename)
    assert report.missing == ("head.w", "head.b")
    assert not report.mismatched
    with pytest.raises(ValueError, match=r"head.w is missing, head.b is missing$"):
        load_weights(head_of(7), path, rename=rename)


@each(
    ("rename", "error", "words"),
    [
        ({"hed": "head"}, ValueError, r"rename: 'hed' matches none of the arrays .*head.w"),
        (
            {"head.w": "head.b"},
            ValueError,
            "a name of its own, got head.b for head",
        ),
        ({re.compile("(head)"): r"\2"}, ValueError, "invalid group reference 2"),
        ({3: "head"}, TypeError, "rename must have names or patterns as keys, got 3"),
        ({"head": 3}, TypeError, "rename must have names or None as values, got 3"),
        (lambda name: 3, TypeError, r"rename must give \w+.\w+ a name or None, got 3"),
        ("head", TypeError, "rename must be a mapping of names or a callable, got 'head'"),
    ],
)
def test_rules_that_give_no_names_are_refused(
    rename: Any, error: type[Exception], words: str, tmp_path: Path
) -> None:
    save_weights(small_model(), tmp_path / "w.safetensors")
    model = small_model(seed=1)
    before = encode(model.state())
    with pytest.raises(error, match=f"^load_weights: .*{words}"):
        load_weights(model, tmp_path / "w.safetensors", rename=rename)
    assert encode(model.state()) == before


def test_the_checksum_that_ranks_compare_is_of_all_arrays_after_loading(tmp_path: Path) -> None:
    save_weights(small_model(), tmp_path / "w.safetensors")
    models = [head_of(7, seed=seed) for seed in (1, 1, 2)]
    for model in models:
        load_weights(model, tmp_path / "w.safetensors", strict=False)
    same, equal, other = (model.loaded for model in models)
    assert same == equal != other
