"""Weights in safetensors files."""

from __future__ import annotations

import errno
import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors import safe_open
from safetensors.numpy import load

from pydtnn import __version__, files
from pydtnn.weights import decode, encode, load_weights, save_weights
from tests.small_training import small_model


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
        assert file.metadata() == {"pydtnn": __version__}


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
    with pytest.raises(FileNotFoundError, match=f"^load_weights: there is no file {path}$"):
        load_weights(small_model(), path)


def test_a_folder_instead_of_a_file_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^load_weights: cannot read .*: is a directory$"):
        load_weights(small_model(), tmp_path)


@pytest.mark.parametrize("cut", [0, 5, 40, -1], ids=["empty", "in size", "in header", "in data"])
def test_a_file_that_is_cut_short_is_refused_and_the_model_stays(cut: int, tmp_path: Path) -> None:
    path, model = tmp_path / "w.safetensors", small_model(seed=1)
    path.write_bytes(encode(small_model().state())[:cut])
    before = encode(model.state())
    message = f"load_weights: {path}: this is no safetensors file, or it is cut short ("
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
    """Other programs save weights in bfloat16."""
    model = small_model(dtype="float32")
    data = encode({name: value.astype(bfloat16) for name, value in model.state().items()})
    if not numpy_lacks_bfloat16(data):
        pytest.skip("this version of safetensors gives bfloat16 to NumPy")
    (tmp_path / "w.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"elements of type BF16, which NumPy does not know; conv"):
        load_weights(model, tmp_path / "w.safetensors")


def numpy_lacks_bfloat16(data: bytes) -> bool:
    try:
        load(data)
    except KeyError:
        return True
    return False
