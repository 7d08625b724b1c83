from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.data import Loader, load_dataset, load_folder, load_shards, pack_shards, verify_shards
from pydtnn.data import packing as module
from pydtnn.data import shards as shards_module
from pydtnn.data.__main__ import main
from pydtnn.data.order import permutation
from pydtnn.data.packing import PROGRESS
from pydtnn.data.shards import INDEX, read_index
from tests.data.image_files import CLASSES, pixels_of, read_all, write_image, write_images
from tests.each import each

SMALL = 400
"""Length of the images of a shard, in B: two of the small ones."""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "images")


@pytest.fixture
def shards(images: Path, tmp_path: Path) -> Path:
    pack_shards(images, tmp_path / "shards", shard_bytes=SMALL, threads=2)
    return tmp_path / "shards"


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their names."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@each("suffix", ["png", "jpg"])
def test_shards_have_the_samples_of_the_folder_in_its_order(tmp_path: Path, suffix: str) -> None:
    root = write_images(tmp_path / "images", suffix)
    packed = pack_shards(root, tmp_path / "shards", shard_bytes=900)
    assert [(part.samples, part.kept) for part in packed] == [(16, 0), (6, 0)]
    assert min(part.shards for part in packed) > 1
    sets = load_dataset("shards", tmp_path / "shards")
    for part, data in zip(("train", "val"), sets, strict=True):
        x, y = read_all(data)
        expected = pixels_of(root / part)
        np.testing.assert_array_equal(x, expected[0])
        np.testing.assert_array_equal(y, expected[1])
        assert (data.name, data.classes, data.class_names) == ("shards", 3, CLASSES)
    assert sets[1].statistics is sets[0].statistics
    indices = np.array([9, 2, 2, 15])
    np.testing.assert_array_equal(sets[0].read(indices)[0], read_all(sets[0])[0][indices])
    assert verify_shards(tmp_path / "shards") == (22, sum(part.shards for part in packed))


def test_a_shard_is_a_tar_file_of_images_and_classes(images: Path, shards: Path) -> None:
    files = sorted((images / "train").glob("*/*"))
    index = read_index("test", shards / "train")
    seen = []
    for shard in index.shards:
        path = shards / "train" / shard.name
        with tarfile.open(path) as tar:
            names = tar.getnames()
            members = [tar.extractfile(name).read() for name in names]
        rows = zip(shard.numbers, shard.labels, shard.offsets, shard.sizes, strict=True)
        for row, (number, label, offset, size) in enumerate(rows):
            assert names[2 * row : 2 * row + 2] == [f"{number:09d}.png", f"{number:09d}.cls"]
            assert members[2 * row : 2 * row + 2] == [files[number].read_bytes(), b"%d" % label]
            assert path.read_bytes()[offset : offset + size] == files[number].read_bytes()
            assert CLASSES[label] == files[number].parent.name
        assert len(names) == 2 * len(shard.numbers)
        assert sum(shard.sizes) <= SMALL
        seen += shard.numbers
    assert sorted(seen) == list(range(16))
    assert seen != sorted(seen)  # training images are shuffled


def test_a_fraction_of_one_level_of_folders_is_the_test_set_of_the_folder(
    images: Path, tmp_path: Path
) -> None:
    pack_shards(images / "train", tmp_path / "shards", test_fraction=0.3)
    folder = load_folder(data_dir=images / "train", test_fraction=0.3)
    for ours, theirs in zip(load_shards(data_dir=tmp_path / "shards"), folder, strict=True):
        np.testing.assert_array_equal(read_all(ours)[0], read_all(theirs)[0])


@pytest.mark.parametrize("size", [1, 3])
def test_each_byte_is_read_once_in_an_epoch_over_all_ranks(
    shards: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, _ = load_shards(data_dir=shards)
    assert train.mean is not None
    reads, everywhere, pread = [], [], os.pread

    def counted(file: int, length: int, offset: int) -> bytes:
        reads.append((os.fstat(file).st_ino, offset, length))
        return pread(file, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    for rank in range(size):
        with Loader(train, global_batch_size=5, rank=rank, size=size, threads=2) as loader:
            count = sum(len(batch) for batch in loader.epoch(1))
        assert count == len(reads)
        everywhere += reads
        reads.clear()
    index = read_index("test", shards / "train")
    expected = [
        ((shards / "train" / shard.name).stat().st_ino, offset, length)
        for shard in index.shards
        for offset, length in zip(shard.offsets, shard.sizes, strict=True)
    ]
    assert sorted(everywhere) == sorted(expected)


def test_samples_are_shuffled_within_windows_of_shards(shards: Path) -> None:
    train, test = load_shards(data_dir=shards, window=2)
    shard_of = {
        number: place
        for place, shard in enumerate(read_index("test", shards / "train").shards)
        for number in shard.numbers
    }
    orders = [train.shuffled(3, epoch) for epoch in range(4)]
    for order in orders:
        assert sorted(order) == list(range(16))
        met = [shard_of[number] for number in order]
        pairs = list(dict.fromkeys(met))  # in the order of their first samples
        for first in range(0, len(pairs), 2):
            rows = [met.index(place) for place in pairs[first : first + 2]]
            last = max(len(met) - met[::-1].index(place) for place in pairs[first : first + 2])
            assert set(met[min(rows) : last]) == set(pairs[first : first + 2])
    assert len({tuple(order) for order in orders}) == 4
    whole = load_shards(data_dir=shards)[0]
    np.testing.assert_array_equal(whole.shuffled(3, 1), permutation(3, 1, 16))
    assert test.shuffled(0, 0).shape == (6,)


def test_more_shards_than_files_that_may_be_open_are_read(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pydtnn.data.shards.MAX_OPEN_FILES", 2)
    expected = read_all(load_shards(data_dir=shards)[0])[0]
    before = len(os.listdir("/proc/self/fd"))
    train, _ = load_shards(data_dir=shards)
    np.testing.assert_array_equal(read_all(train)[0], expected)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def interrupted(monkeypatch: pytest.MonkeyPatch, images: Path) -> Callable[[], object]:
    """The third file that is written is the last; the function undoes it."""
    written: list[Path] = []

    def write(who: str, path: Path, data: bytes) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(path)
        original(who, path, data)

    original = module.write_file
    monkeypatch.setattr(module, "write_file", write)
    return lambda: monkeypatch.setattr(module, "write_file", original)


def damaged(monkeypatch: pytest.MonkeyPatch, images: Path) -> Callable[[], object]:
    """An image is damaged; the function repairs it."""
    path = images / "train" / "bee" / "3.png"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return lambda: path.write_bytes(content)


@pytest.mark.parametrize("stop", [interrupted, damaged])
def test_packing_continues_after_the_last_complete_shard_with_the_same_bytes(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Any
) -> None:
    resume = stop(monkeypatch, images)
    output = tmp_path / "resumed"
    with pytest.raises((KeyboardInterrupt, ValueError), match=r"^$|pack: .*bee/3.png is damaged"):
        pack_shards(images, output, shard_bytes=SMALL)
    resume()
    assert not (output / "train" / INDEX).exists()
    complete = {path: path.stat().st_ino for path in output.rglob("*.tar")}
    assert complete
    train, test = pack_shards(images, output, shard_bytes=SMALL)
    assert (train.kept, test.kept) == (len(complete), 0)
    assert all(path.stat().st_ino == inode for path, inode in complete.items())
    pack_shards(images, tmp_path / "fresh", shard_bytes=SMALL)
    assert contents(output) == contents(tmp_path / "fresh")
    again = pack_shards(images, output, shard_bytes=SMALL)
    assert [part.kept for part in again] == [part.shards for part in again]
    assert contents(output) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("change", ["pixels", "name", "shard", "progress"])
def test_what_has_changed_is_packed_again(
    images: Path, shards: Path, tmp_path: Path, change: str
) -> None:
    if change == "pixels":
        old = (images / "train" / "ant" / "0.png").stat()
        write_image(images / "train" / "ant" / "0.png", np.zeros((6, 5, 3), np.uint8))
        assert (images / "train" / "ant" / "0.png").stat().st_mtime_ns > old.st_mtime_ns
    elif change == "name":
        for part in ("train", "val"):
            (images / part / "ant").rename(images / part / "dog")
    elif change == "shard":
        os.truncate(shards / "train" / "shard-000001.tar", 1000)
    else:
        (shards / "train" / PROGRESS).write_text("{")
    train, _ = pack_shards(images, shards, shard_bytes=SMALL)
    assert train.kept < train.shards
    pack_shards(images, tmp_path / "fresh", shard_bytes=SMALL)
    names = ("train", "test")
    assert [(shards / name / INDEX).read_bytes() for name in names] == [
        (tmp_path / "fresh" / name / INDEX).read_bytes() for name in names
    ]
    verify_shards(shards)


FIRST = "train/shard-000000.tar"


def rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(shards: Path) -> None:
        content = json.loads((shards / "train" / INDEX).read_text())
        change(content)
        (shards / "train" / INDEX).write_text(json.dumps(content))

    return apply


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: (s / FIRST).unlink(), "the shard .*shard-000000.tar does not exist; copy it"),
        (lambda s: os.truncate(s / FIRST, 700), "must have .* B, got 700; it is truncated"),
        (lambda s: (s / "test" / INDEX).unlink(), "test/index.json does not exist; specify a fol"),
        (lambda s: (s / "train" / INDEX).write_text("{"), "cannot be used: it cannot be parsed"),
        (lambda s: (s / "train" / INDEX).write_text("[]"), "cannot be used: it must contain an o"),
        (rewrite(lambda c: c.update(format=9)), "its format must be 1 .*, got 9; copy it again"),
        (rewrite(lambda c: c["shards"][0]["labels"].reverse()), "not match the checksum in it; co"),
        (rewrite(lambda c: c.pop("sha256")), "does not match the checksum in it"),
    ],
)
def test_damaged_shards_and_indices_are_told_in_one_sentence(
    shards: Path, change: Callable[[Path], object], reason: str
) -> None:
    change(shards)
    for who, use in (("shards", lambda: load_shards(data_dir=shards)), ("verify", None)):
        with pytest.raises((ValueError, FileNotFoundError), match=f"^{who}: .*{reason}") as error:
            use() if use else verify_shards(shards)
        assert "\n" not in str(error.value)


def test_an_image_that_is_damaged_after_packing_is_told_by_its_number(shards: Path) -> None:
    train, _ = load_shards(data_dir=shards, check=False)
    shard = read_index("test", shards / "train").shards[1]
    path = shards / "train" / shard.name
    data = bytearray(path.read_bytes())
    data[shard.offsets[0] : shard.offsets[0] + 8] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{shard.numbers[0]:09d} of .*{shard.name}, got other"):
        train.read(np.array([shard.numbers[0]]))
    with pytest.raises(ValueError, match=f"verify: the shard .*{shard.name} does not match its ch"):
        verify_shards(shards)
    os.truncate(path, 600)
    with pytest.raises(ValueError, match="has become shorter; copy it again"):
        train.read(np.array([shard.numbers[-1]]))


def flip_a_pixel(shards: Path, part: str = "train") -> tuple[Path, int]:
    """Damage the pixels of a shard so that they are decoded; return its path and an image."""
    index = read_index("test", shards / part)
    shard = index.shards[1]
    path = shards / part / shard.name
    data = bytearray(path.read_bytes())
    number = np.frombuffer(data, np.uint8)
    place = shard.offsets[0] + shard.sizes[0] // 2
    number[place] ^= 4
    path.write_bytes(data)
    return path, shard.numbers[0]


def test_pixels_that_have_changed_are_found_when_a_shard_is_first_read(tmp_path: Path) -> None:
    pack_shards(write_images(tmp_path / "images", "jpg"), tmp_path / "shards", shard_bytes=900)
    shards = tmp_path / "shards"
    path, number = flip_a_pixel(shards)
    given = {"data_dir": shards, "image_size": 4, "mean": [0.5] * 3, "std": [0.2] * 3}
    with pytest.raises(ValueError, match=f"shards: the shard .*{path.name} does not match its ch"):
        load_shards(**given)[0].read(np.array([number]))
    train, _ = load_shards(**given, check=False)
    assert train.read(np.array([number]))[0].shape == (1, 4, 4, 3)  # decoded to other pixels
    with pytest.raises(TypeError, match="shards: check must be true or false, got 1"):
        load_shards(**given, check=1)


def test_a_shard_is_compared_once(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(who: str, path: Path, shard: Any) -> Any:
        compared.append(path.name)
        return original(who, path, shard)

    original = shards_module.compare_shard
    monkeypatch.setattr(shards_module, "compare_shard", compare)
    train, _ = load_shards(data_dir=shards)
    for indices in ([3, 1], [1], range(16), range(16)):
        train.read(np.array(indices))
    assert sorted(compared) == [path.name for path in train.paths]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s[0].update(name="../../../.bashrc.tar"), "plain names of files in .*/train, g"),
        (lambda s: s[0].update(name="/etc/passwd.tar"), "plain names of files in .*, got '/etc/pa"),
        (lambda s: s[0].update(name="a\0.tar"), r"plain names of files in .*, got 'a.x00.tar'"),
        (lambda s: s[0].update(name="..\\a.tar"), "plain names of files in"),
        (lambda s: s[0].update(name="index.json"), "the name of a file that ends in .tar"),
        (lambda s: s[0].update(name=7), "the name of a file that ends in .tar"),
        (lambda s: s[1].update(name=s[0]["name"]), "two shards have the same name"),
        (lambda s: s[0]["labels"].__setitem__(0, 10_000_000), "labels must be in 0..2, got 10000"),
        (lambda s: s[0]["labels"].__setitem__(1, -(10**9)), "labels must be in 0..2, got -1000000"),
        (lambda s: s[0]["labels"].__setitem__(1, 1.5), "expected one integer per image in numbers"),
        (lambda s: s[0]["labels"].__setitem__(1, True), "expected one integer per image"),
        (lambda s: s[0]["labels"].pop(), "expected one integer per image in numbers, labels, off"),
        (lambda s: s[0]["sizes"].__setitem__(0, 10**30), r"sizes must be in 0..\d+, got 100000000"),
        (lambda s: s[0]["offsets"].__setitem__(0, s[0]["nbytes"]), "an image ends behind the"),
        (lambda s: s[0]["numbers"].__setitem__(0, 99), "must be those from 0 to 15, each once"),
        (lambda s: s[0]["numbers"].__setitem__(0, 10**400), "numbers must be in 0..4611686018427"),
        (lambda s: s[0].pop("sizes"), "expected the entries name, nbytes, sha256, numbers, label"),
        (lambda s: s[0].update(nbytes=-1), "nbytes must be a number of bytes"),
        (lambda s: s.__setitem__(0, None), "shards must be a list of objects"),
        (lambda s: s.clear(), "shards must be a list of objects"),
    ],
)
def test_an_index_with_a_right_checksum_and_wrong_values_is_refused(
    shards: Path, change: Callable[[Any], object], reason: str
) -> None:
    forge(shards, lambda content: change(content["shards"]))
    for use in (lambda: load_shards(data_dir=shards), lambda: verify_shards(shards)):
        with pytest.raises(ValueError, match=reason) as error:
            use()
        assert "\n" not in str(error.value)


def forge(shards: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an index, with its checksum."""
    path = shards / "train" / INDEX
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    text = json.dumps(content, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content, separators=(",", ":")))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.update(class_names=None), "class_names must be a list of names"),
        (lambda c: c.update(class_names=["a", 3]), "class_names must be a list of names"),
        (lambda c: c.update(shards={}), "shards must be a list of objects"),
        (lambda c: c.update(samples=3), "it must have 16 samples"),
        (lambda c: c.update(class_names=["a", "b", "c"]), "must have the classes of"),
    ],
)
def test_an_index_with_other_entries_is_refused(
    shards: Path, change: Callable[[Any], object], reason: str
) -> None:
    forge(shards, change)
    with pytest.raises(ValueError, match=reason):
        load_shards(data_dir=shards)


def test_a_link_out_of_the_folder_is_not_read(shards: Path, tmp_path: Path) -> None:
    shard = shards / FIRST
    shard.rename(tmp_path / "secret.tar")
    shard.symlink_to(tmp_path / "secret.tar")
    with pytest.raises(ValueError, match="got .*shard-000000.tar, a link to .*/secret.tar; replac"):
        load_shards(data_dir=shards)
    shard.unlink()
    shard.symlink_to(shard)
    with pytest.raises(ValueError, match="shard-000000.tar.* link"):
        load_shards(data_dir=shards)


def test_nothing_is_read_before_training_with_a_size_and_statistics(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pread", None)
    given = {"mean": [0.5] * 3, "std": [0.2] * 3}
    both = load_shards(data_dir=shards, image_size=4, **given, check=False)
    assert [data.examined and data.verified for data in both] == [True, True]
    assert [data.verified for data in load_shards(data_dir=shards, image_size=4)] == [False] * 2
    assert both[0].std.tolist() == given["std"]
    assert [data.examined for data in load_shards(data_dir=shards, image_size=4)] == [False, True]
    with pytest.raises(ValueError, match="shards: window must be at least 1, got 0"):
        load_shards(data_dir=shards, window=0)


def test_the_commands_pack_and_verify(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "out")
    arguments = ["pack", str(images), "--output", output, "--shard-size", "1KiB", "--threads=1"]
    assert main(arguments) == 0
    assert "train: 16 images in 3 shards, 0.0 MB" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "16 images in 3 shards, of which 3 were complete" in capsys.readouterr().out
    assert main(["verify", output]) == 0
    assert "22 images in 4 shards match their checksums" in capsys.readouterr().out
    (images / "val" / "notes.txt").touch()
    assert main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["verify", str(images)]) == 1
    assert "index.json does not exist; specify a folder that" in capsys.readouterr().err
