from __future__ import annotations

import gzip
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import load_mnist
from pydtnn.data.mnist import FILES, read_idx
from tests.each import each


def idx(values: NDArray[np.uint8]) -> bytes:
    header = struct.pack(f">I{values.ndim}I", 0x0800 | values.ndim, *values.shape)
    return header + values.tobytes()


Contents = dict[str, NDArray[np.uint8]]
IMAGES, LABELS = FILES[:2]


@pytest.fixture
def contents(rng: np.random.Generator) -> Contents:
    """Seven and five images with their labels, by file name."""
    made: Contents = {}
    for n, (images, labels) in zip((7, 5), (FILES[:2], FILES[2:]), strict=True):
        made[images] = rng.integers(0, 256, (n, 28, 28)).astype(np.uint8)
        made[labels] = rng.integers(0, 10, n).astype(np.uint8)
    return made


def write(folder: Path, contents: Contents, zipped: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in contents.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
        else:
            (folder / name).write_bytes(idx(values))
    return folder


@each(("folder", "zipped"), [(".", False), ("mnist", True), ("MNIST/raw", False)])
def test_mnist_is_read_gzipped_or_not_from_the_folder_or_one_inside(
    tmp_path, contents, folder, zipped
):
    write(tmp_path / folder, contents, zipped)
    train, test = load_mnist(data_dir=tmp_path)
    for n, data, (images, labels) in ((7, train, FILES[:2]), (5, test, FILES[2:])):
        x, y = data.read(np.arange(n))
        np.testing.assert_array_equal(x[..., 0], contents[images])
        np.testing.assert_array_equal(y, contents[labels])
        assert (data.name, data.input_shape, data.classes) == ("mnist", (28, 28, 1), 10)
    np.testing.assert_allclose(train.mean, [contents[IMAGES].mean() / 255], rtol=1e-13)
    assert test.mean is train.mean
    found = read_idx(tmp_path / folder / f"{IMAGES}{'.gz' if zipped else ''}", 3)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0


def test_files_of_the_test_set_alone_are_told_from_none_at_all(tmp_path, contents):
    write(tmp_path / "mnist", {name: contents[name] for name in FILES[2:]})
    with pytest.raises(FileNotFoundError, match="expected train-images-idx3-ubyte, "):
        load_mnist(data_dir=tmp_path)


WHOLE = idx(np.zeros((7, 28, 28), np.uint8))


@each(
    ("name", "content", "reason"),
    [
        (IMAGES, WHOLE[:-1], "expected 7 x 28 x 28 bytes after the header, got 5487"),
        (IMAGES, WHOLE + b"x", "expected 7 x 28 x 28 bytes after the header, got more"),
        (IMAGES, WHOLE[:10], "expected the header of an idx file, got 10 bytes"),
        (IMAGES, b"\x89PNG" + WHOLE[4:], "got 0x89504e47"),
        (IMAGES, WHOLE[:2] + b"\x0d" + WHOLE[3:], "got 0x00000d03"),
        (IMAGES, idx(np.zeros(7, np.uint8)), "check that images and labels were not exchanged"),
        (IMAGES, idx(np.zeros((7, 14, 56), np.uint8)), "28 x 28 pixels"),
        (IMAGES, idx(np.zeros((0, 28, 28), np.uint8)), "got 0 x 28 x 28"),
        (LABELS, idx(np.zeros(6, np.uint8)), "got 7 images in .* and 6 labels"),
        (LABELS, idx(np.full(7, 10, np.uint8)), "must be in 0..9, got 10"),
    ],
)
def test_a_damaged_file_is_told_with_its_name_in_one_sentence(
    tmp_path, contents, name, content, reason
):
    (write(tmp_path, contents) / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason) as error:
        load_mnist(data_dir=tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@each(
    ("change", "reason"),
    [
        (lambda b: b[:-100], "damaged gzip file"),
        (lambda b: b[:200] + bytes([b[200] ^ 255]) + b[201:], "damaged gzip file"),
        (lambda b: b"", "idx file, got 0 bytes"),
        (lambda b: gzip.compress(WHOLE[:-1]), "got 5487"),
        (lambda b: gzip.compress(WHOLE + b"x"), "got more"),
        (
            lambda b: gzip.compress(struct.pack(">4I", 0x0803, 2**32 - 1, 28, 28)),
            "expands from 32 B to 3,367,254,359,280 B, more than 67,108,864 B",
        ),
    ],
)
def test_a_damaged_gzip_file_is_told_in_one_sentence(tmp_path, contents, change, reason):
    file = write(tmp_path, contents, zipped=True) / f"{IMAGES}.gz"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=reason):
        load_mnist(data_dir=tmp_path)


def test_an_idx_file_that_is_cut_after_it_was_read_does_no_harm(tmp_path, contents):
    """What is mapped into memory and then cut ends the process with SIGBUS."""
    code = (
        "import sys; from pydtnn.data import load_mnist\n"
        "train, _ = load_mnist(data_dir=sys.argv[1])\n"
        "open(sys.argv[1] + '/' + sys.argv[2], 'w').close()\n"
        "print(train.read([0, 6])[0].sum())"
    )
    command = [sys.executable, "-c", code, str(write(tmp_path, contents)), IMAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == int(contents[IMAGES][[0, 6]].sum())


def test_the_real_mnist_is_read(real_data):
    train, test = load_mnist(data_dir=real_data("mnist-8k"))
    assert (len(train), len(test)) == (8000, 2000)
    # All 60,000 images have mean 0.1307 and deviation 0.3081; 8,000 others are near.
    np.testing.assert_allclose([train.mean[0], train.std[0]], [0.1307, 0.3081], atol=0.005)
