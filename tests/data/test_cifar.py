from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pydtnn.data import Dataset, Loader, load_cifar10, load_cifar100
from pydtnn.data.cifar import LAYOUTS_10, LAYOUTS_100, NAMES_10, NAMES_100
from tests.data.pickles import array, numbers, pickled, string
from tests.each import each

Records = NDArray[np.uint8]


def make_records(rng: np.random.Generator, counts: tuple[int, ...], *classes: int) -> list[Records]:
    """Files of records: labels of so many classes each, then 3072 pixels plane by plane."""
    files = [rng.integers(0, 256, (n, len(classes) + 3072)).astype(np.uint8) for n in counts]
    for file in files:
        file[:, : len(classes)] %= np.array(classes, np.uint8)
    return files


def make_cifar10(rng: np.random.Generator) -> list[Records]:
    return make_records(rng, (4, 3, 4, 2, 4, 5), 10)


def write(folder: Path, version: str, files: list[Records], *keys: str) -> tuple[str, ...]:
    """Write the files of a version into a folder; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (LAYOUTS_10 if len(keys) == 1 else LAYOUTS_100)[version != "binary"].files
    for name, file in zip(names, files, strict=True):
        data = np.ascontiguousarray(file[:, len(keys) :])
        labels = {key: file[:, i].tolist() for i, key in enumerate(keys)}
        if version == "binary":
            content = file.tobytes()
        elif version == "python 3":
            content = pickle.dumps({"data": data, **labels}, protocol=4)
        else:
            lists = {key: numbers(values) for key, values in labels.items()}
            content = pickled(data=array(data), batch_label=string(b"one of five"), **lists)
        (folder / name).write_bytes(content)
    return names


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


@each(("version", "inside"), [("binary", True), ("python 2", False), ("python 3", True)])
def test_cifar10_is_read_in_all_versions_from_the_folder_or_the_one_around_it(
    tmp_path, rng, version, inside
):
    files = make_cifar10(rng)
    folder = LAYOUTS_10[version != "binary"].folders[0] if inside else "."
    write(tmp_path / folder, version, files, "labels")
    train, test = load_cifar10(data_dir=tmp_path, any_size=True)
    check(train, files[:5], 0, 1)
    check(test, files[5:], 0, 1)
    assert (train.name, train.classes, test.classes) == ("cifar10", 10, 10)
    assert test.mean is train.mean
    with pytest.raises(ValueError, match=r"data_batch_1\S* must contain 10000 images, got 4"):
        load_cifar10(data_dir=tmp_path)


@each(("labels", "column", "classes"), [("coarse", 0, 20), ("fine", 1, 100)])
@each("version", ["binary", "python 2"])
def test_cifar100_has_fine_and_coarse_labels_in_both_versions(
    tmp_path, rng, version, labels, column, classes
):
    files = make_records(rng, (6, 5), 20, 100)
    folder = tmp_path / LAYOUTS_100[version != "binary"].folders[0]
    write(folder, version, files, "coarse_labels", "fine_labels")
    train, test = load_cifar100(data_dir=tmp_path, labels=labels, any_size=True)
    check(train, files[:1], column, 2)
    check(test, files[1:], column, 2)
    assert (train.classes, train.class_names) == (classes, NAMES_100[labels])
    assert test.class_names == train.class_names
    with pytest.raises(ValueError, match=r"train\S* must contain 50000 images, got 6"):
        load_cifar100(data_dir=tmp_path)


def test_an_unknown_kind_of_labels_is_refused():
    with pytest.raises(ValueError, match=r"cifar100: unknown kind of labels 'finer'; .* 'fine'"):
        load_cifar100(labels="finer")


DATA = np.zeros((2, 3072), np.uint8)
NO_IMAGES = "must contain 'data' of 3072 bytes per image"


@each(
    ("content", "reason"),
    [
        (b"\0" * 3072, "must contain records of 3073 bytes, got 3072 bytes"),
        (b"", "must contain records of 3073 bytes, got 0"),
        (b"\x0a" + b"\0" * 3072, "must be in 0..9, got 10"),
        ({"data": DATA}, "2 images and 0 labels"),
        ({"data": DATA, "labels": [1, 2, 3]}, "2 images and 3 labels"),
        ({"data": DATA, "labels": [1, 10]}, "must be in 0..9, got 10"),
        ({"data": DATA, "labels": [-1, 10**30]}, "must be in 0..9, got -1"),
        ({"data": DATA[:, 1:], "labels": [1, 2]}, NO_IMAGES),
        ({"data": DATA[:0], "labels": []}, NO_IMAGES),
        ({"data": [1], "labels": [1]}, NO_IMAGES),
        (pickle.dumps({"data": DATA, "labels": [1, 2]}, 4)[:-9], "cannot be read as a pickle"),
    ],
)
def test_a_file_that_holds_no_cifar_is_told_with_its_name_in_one_sentence(
    tmp_path, rng, content, reason
):
    binary = isinstance(content, bytes) and content[:1] != b"\x80"
    names = write(tmp_path, "binary" if binary else "python 3", make_cifar10(rng), "labels")
    (tmp_path / names[3]).write_bytes(
        content if isinstance(content, bytes) else pickle.dumps(content, protocol=4)
    )
    with pytest.raises(ValueError, match=reason) as error:
        load_cifar10(data_dir=tmp_path, any_size=True)
    assert str(tmp_path / names[3]) in str(error.value)


class Call:
    """Something whose pickle calls a function when it is read."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_in_a_pickle_is_executed(tmp_path, rng, protocol):
    names = write(tmp_path, "python 3", make_cifar10(rng), "labels")
    content = {"call": Call(os.mkdir, str(tmp_path / "made")), "data": DATA, "labels": [1, 2]}
    (tmp_path / names[3]).write_bytes(pickle.dumps(content, protocol))
    train, _ = load_cifar10(data_dir=tmp_path, any_size=True)
    assert len(train) == 17
    assert not (tmp_path / "made").exists()


@each(
    "damage",
    [
        b"T\xff\xff\xff\x7f",  # sizes that are not there
        b"\x8e" + b"\xff" * 7 + b"\x7f",
        b"r\xff\xff\xff\xff" * 9,
        b")" + b"\x85" * 300_000 + b"K\x01s",  # keys that cannot be hashed
    ],
)
def test_hostile_pickles_take_no_memory_and_do_not_end_the_interpreter(tmp_path, rng, damage):
    names = write(tmp_path, "python 3", make_cifar10(rng), "labels")
    (tmp_path / names[3]).write_bytes(b"\x80\x02}" + damage + b".")
    with pytest.raises(ValueError, match="download it again"):
        load_cifar10(data_dir=tmp_path, any_size=True)


def test_the_real_cifar10_is_read(real_data):
    train, test = load_cifar10(data_dir=real_data("cifar-10-batches-bin").parent)
    assert (len(train), len(test)) == (50_000, 10_000)
    # The published figures; copies that were stored as JPEG differ a little.
    np.testing.assert_allclose(train.mean, [0.4914, 0.4822, 0.4465], atol=0.005)
    np.testing.assert_allclose(train.std, [0.2470, 0.2435, 0.2616], atol=0.005)
    with Loader(train, global_batch_size=128) as loader:
        batch = next(iter(loader.epoch(0)))
    np.testing.assert_array_equal(batch.y, train.read(batch.samples)[1])


def test_a_file_that_is_cut_while_it_is_read_is_no_more_than_an_error(tmp_path, rng):
    """What is mapped into memory and then cut ends the process with SIGBUS."""
    write(tmp_path, "binary", make_cifar10(rng), "labels")
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


def test_every_class_has_a_name():
    every = (NAMES_10, NAMES_100["coarse"], NAMES_100["fine"])
    assert [len(set(names)) for names in every] == [10, 20, 100]
    assert all(list(names) == sorted(names) for names in every)
