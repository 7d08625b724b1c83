from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import Dataset, Loader, cifar, load_cifar10, load_cifar100
from pydtnn.data.cifar import LAYOUTS_10, LAYOUTS_100, NAMES_10, NAMES_100
from tests.data.pickles import array, numbers, pickled, string
from tests.each import each

Records = NDArray[np.uint8]


def make_cifar10(rng: np.random.Generator) -> list[Records]:
    """Six files of records: a label, then 3072 pixels plane by plane."""
    files = [rng.integers(0, 256, (n, 3073)).astype(np.uint8) for n in (4, 3, 4, 2, 4, 5)]
    for file in files:
        file[:, 0] %= 10
    return files


def make_cifar100(rng: np.random.Generator) -> list[Records]:
    """Two files of records: a coarse label, a fine label, 3072 pixels."""
    files = [rng.integers(0, 256, (n, 3074)).astype(np.uint8) for n in (6, 5)]
    for file in files:
        file[:, 0] %= 20
        file[:, 1] %= 100
    return files


def write_binary(folder: Path, names: tuple[str, ...], files: list[Records]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in zip(names, files, strict=True):
        (folder / name).write_bytes(file.tobytes())


def write_python(
    folder: Path, names: tuple[str, ...], files: list[Records], keys: tuple[str, ...], modern: bool
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in zip(names, files, strict=True):
        data = np.ascontiguousarray(file[:, len(keys) :])
        labels = {key: file[:, i].tolist() for i, key in enumerate(keys)}
        if modern:
            content = pickle.dumps({"data": data, **labels}, protocol=4)
        else:
            lists = {key: numbers(values) for key, values in labels.items()}
            content = pickled(data=array(data), batch_label=string(b"one of five"), **lists)
        (folder / name).write_bytes(content)


def check(data: Dataset, files: list[Records], column: int, label_bytes: int) -> None:
    """Compare samples read in a mixed order, across files, with the records."""
    records = np.concatenate(files)
    order = np.random.default_rng(1).permutation(len(records))
    x, y = data.read(order)
    planes = records[order, label_bytes:].reshape(-1, 3, 32, 32)
    np.testing.assert_array_equal(x, planes.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(y, records[order, column])
    assert (len(data), data.input_shape) == (len(records), (32, 32, 3))
    assert y.dtype == np.int64


@each("inside", [True, False])
@each("version", ["binary", "python 2", "python 3"])
def test_cifar10_is_read_in_all_versions_from_the_folder_or_the_one_around_it(
    tmp_path: Path, rng: np.random.Generator, version: str, inside: bool
) -> None:
    files = make_cifar10(rng)
    layout = LAYOUTS_10[version != "binary"]
    folder = tmp_path / layout.folders[0] if inside else tmp_path
    if version == "binary":
        write_binary(folder, layout.files, files)
    else:
        write_python(folder, layout.files, files, ("labels",), version == "python 3")
    train, test = load_cifar10(data_dir=tmp_path, any_size=True)
    check(train, files[:5], 0, 1)
    check(test, files[5:], 0, 1)
    assert (train.name, train.classes, test.classes) == ("cifar10", 10, 10)
    assert test.mean is train.mean


@each(("labels", "column", "classes"), [("coarse", 0, 20), ("fine", 1, 100)])
@each("version", ["binary", "python 2"])
def test_cifar100_has_fine_and_coarse_labels_in_both_versions(
    tmp_path: Path,
    rng: np.random.Generator,
    version: str,
    labels: str,
    column: int,
    classes: int,
) -> None:
    files = make_cifar100(rng)
    layout = LAYOUTS_100[version != "binary"]
    folder = tmp_path / layout.folders[0]
    if version == "binary":
        write_binary(folder, layout.files, files)
    else:
        write_python(folder, layout.files, files, ("coarse_labels", "fine_labels"), False)
    train, test = load_cifar100(data_dir=tmp_path, labels=labels, any_size=True)
    check(train, files[:1], column, 2)
    check(test, files[1:], column, 2)
    assert train.classes == classes


def test_an_unknown_kind_of_labels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cifar100: unknown kind of labels 'finer'; .* 'fine'"):
        load_cifar100(labels="finer")


def test_a_batch_without_samples_can_be_read(tmp_path: Path, rng: np.random.Generator) -> None:
    write_binary(tmp_path, LAYOUTS_10[0].files, make_cifar10(rng))
    x, y = load_cifar10(data_dir=tmp_path, any_size=True)[0].read(np.empty(0, np.int64))
    assert (x.shape, y.shape) == ((0, 32, 32, 3), (0,))


@each(
    ("change", "reason"),
    [
        (lambda b: b[:-1], "must contain records of 3073 bytes, got 9218 bytes"),
        (lambda b: b"", "must contain records of 3073 bytes, got 0"),
        (lambda b: b"\x0a" + b[1:], "must be in 0..9, got 10"),
    ],
)
def test_a_damaged_binary_file_is_told_with_its_name_in_one_sentence(
    tmp_path: Path, rng: np.random.Generator, change: Callable[[bytes], bytes], reason: str
) -> None:
    write_binary(tmp_path, LAYOUTS_10[0].files, make_cifar10(rng))
    file = tmp_path / "data_batch_2.bin"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"cifar10: (labels in )?\S*data_batch_2.bin {reason}"):
        load_cifar10(data_dir=tmp_path, any_size=True)


DATA = np.zeros((2, 3072), np.uint8)


@each(
    ("content", "reason"),
    [
        ({"data": DATA}, "must contain the numbers 'labels'"),
        ({"data": DATA, "labels": ["a", "b"]}, "must contain the numbers 'labels'"),
        ({"data": DATA, "labels": [1, 2, 3]}, "2 images and 3 labels"),
        ({"data": DATA, "labels": [1, 10]}, "must be in 0..9, got 10"),
        ({"data": DATA, "labels": [-1, 10**30]}, "must be in 0..9, got -1"),
        ({"data": DATA[:, 1:], "labels": [1, 2]}, "must contain 'data' of 3072 bytes per image"),
        ({"data": DATA[:0], "labels": []}, "must contain 'data' of 3072 bytes per image"),
        ({"labels": [1, 2]}, "must contain 'data' of 3072 bytes per image"),
        ({"data": [1], "labels": [1]}, "must contain 'data' of 3072 bytes per image"),
    ],
)
def test_a_pickle_that_holds_no_cifar_is_told_in_one_sentence(
    tmp_path: Path, rng: np.random.Generator, content: dict[str, Any], reason: str
) -> None:
    names = LAYOUTS_10[1].files
    write_python(tmp_path, names, make_cifar10(rng), ("labels",), True)
    (tmp_path / names[3]).write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(ValueError, match=reason) as error:
        load_cifar10(data_dir=tmp_path, any_size=True)
    assert str(tmp_path / names[3]) in str(error.value)


def test_the_real_cifar10_is_read(real_data: Callable[[str], Path]) -> None:
    train, test = load_cifar10(data_dir=real_data("cifar-10-batches-bin").parent)
    assert (len(train), len(test)) == (50_000, 10_000)
    assert train.mean is not None
    assert train.std is not None
    # The published figures; copies that were stored as JPEG differ a little.
    np.testing.assert_allclose(train.mean, [0.4914, 0.4822, 0.4465], atol=0.005)
    np.testing.assert_allclose(train.std, [0.2470, 0.2435, 0.2616], atol=0.005)
    with Loader(train, global_batch_size=128) as loader:
        batch = next(iter(loader.epoch(0)))
    np.testing.assert_array_equal(batch.y, train.read(batch.samples)[1])


@each("version", ["binary", "python 3"])
def test_a_file_that_is_cut_at_the_end_of_an_image_is_refused(
    tmp_path: Path, rng: np.random.Generator, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "COUNTS_10", (4, 3, 4, 2, 4, 5))
    files = make_cifar10(rng)
    names = LAYOUTS_10[version != "binary"].files
    for whole in (True, False):
        if version == "binary":
            write_binary(tmp_path, names, files)
        else:
            write_python(tmp_path, names, files, ("labels",), True)
        if whole:
            assert len(load_cifar10(data_dir=tmp_path)[0]) == 17
            files[1] = files[1][:-1]
    words = r"cifar10: \S*data_batch_2\S* must contain 3 images, got 2; .* any_size=True"
    with pytest.raises(ValueError, match=words):
        load_cifar10(data_dir=tmp_path)
    assert len(load_cifar10(data_dir=tmp_path, any_size=True)[0]) == 16


def test_files_are_compared_with_the_original_number_of_images(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    write_binary(tmp_path, LAYOUTS_10[0].files, make_cifar10(rng))
    with pytest.raises(ValueError, match=r"data_batch_1.bin must contain 10000 images, got 4"):
        load_cifar10(data_dir=tmp_path)


def test_files_of_cifar100_are_counted_too(tmp_path: Path, rng: np.random.Generator) -> None:
    write_binary(tmp_path, LAYOUTS_100[0].files, make_cifar100(rng))
    with pytest.raises(ValueError, match=r"train.bin must contain 50000 images, got 6"):
        load_cifar100(data_dir=tmp_path)


def test_a_file_that_is_cut_while_it_is_read_is_no_more_than_an_error(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """What is mapped into memory and then cut ends the process with SIGBUS."""
    write_binary(tmp_path, LAYOUTS_10[0].files, make_cifar10(rng))
    code = (
        "import sys; from pydtnn.data import cifar\n"
        "checked = cifar._checked\n"
        "def cut(name, path, labels, classes):\n"
        "    open(path, 'w').close()\n"
        "    return checked(name, path, labels, classes)\n"
        "cifar._checked = cut\n"
        "train, _ = cifar.load_cifar10(data_dir=sys.argv[1], any_size=True)\n"
        "print(len(train))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "17\n", "")


def test_every_class_has_a_name() -> None:
    assert [len(set(names)) for names in (NAMES_10, NAMES_100["coarse"], NAMES_100["fine"])] == [
        10,
        20,
        100,
    ]
    assert all(list(names) == sorted(names) for names in (NAMES_10, *NAMES_100.values()))
