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

from pydtnn.data import load_dataset
from pydtnn.data.order import permutation
from pydtnn.tools.shards import load_shards, pack_shards, verify_shards
from pydtnn.tools.shards.__main__ import main
from pydtnn.tools.shards.reading import INDEX, read_index, window_permutation
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
def test_shards_have_the_samples_of_the_folder_in_its_order(tmp_path, suffix):
    root = write_images(tmp_path / "images", suffix)
    packed = pack_shards(root, tmp_path / "shards", shard_bytes=900)
    assert [part.samples for part in packed] == [16, 6]
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


def test_a_shard_is_a_tar_file_of_images_and_classes(images, shards):
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


def test_more_shards_than_files_that_may_be_open_are_read(shards, monkeypatch):
    monkeypatch.setattr("pydtnn.tools.shards.reading.MAX_OPEN_FILES", 2)
    expected = read_all(load_shards(data_dir=shards)[0])[0]
    before = len(os.listdir("/proc/self/fd"))
    train, _ = load_shards(data_dir=shards)
    np.testing.assert_array_equal(read_all(train)[0], expected)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_damaged_image_is_named_and_what_has_changed_is_packed_again(tmp_path):
    images, shards = write_images(tmp_path / "images"), tmp_path / "shards"
    path = images / "train" / "bee" / "3.png"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"pack: .*bee/3.png is damaged"):
        pack_shards(images, shards, shard_bytes=SMALL)
    assert not (shards / "train" / INDEX).exists()
    write_image(path, np.zeros((6, 5, 3), np.uint8))
    (shards / "train" / f".shard-000000.tar.{'0f' * 16}").touch()  # of a process that was killed
    pack_shards(images, shards, shard_bytes=SMALL)
    pack_shards(images, tmp_path / "fresh", shard_bytes=SMALL)
    assert contents(shards) == contents(tmp_path / "fresh")
    verify_shards(shards)


def rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new, 1))


@each(
    ("name", "change", "reason"),
    [
        ("train/shard-000000.tar", Path.unlink, "shard-000000.tar does not exist; copy it"),
        ("train/shard-000000.tar", lambda p: os.truncate(p, 700), "must have .* B, got 700; it is"),
        (f"test/{INDEX}", Path.unlink, "test/index.json does not exist; specify a fol"),
        (f"train/{INDEX}", lambda p: p.write_text("{"), "cannot be used: it cannot be parsed"),
        (f"train/{INDEX}", lambda p: p.write_text("[]"), "cannot be used: it must contain an o"),
        (f"train/{INDEX}", lambda p: rewrite(p, '"format":1', '"format":9'), "must be 1 .*, got 9"),
        (f"train/{INDEX}", lambda p: rewrite(p, "ant", "ent"), "not match the checksum in it; co"),
        (f"train/{INDEX}", lambda p: rewrite(p, "sha256", "sha"), "does not match the checksum"),
    ],
)
def test_damaged_shards_and_indices_are_told_in_one_sentence(tmp_path, name, change, reason):
    pack_shards(write_images(tmp_path / "images"), tmp_path / "s", shard_bytes=SMALL)
    change(tmp_path / "s" / name)
    for who, use in (("shards", load_dataset), ("verify", None)):
        with pytest.raises((ValueError, FileNotFoundError), match=f"^{who}: .*{reason}") as error:
            use("shards", tmp_path / "s") if use else verify_shards(tmp_path / "s")
        assert "\n" not in str(error.value)


def test_an_image_that_is_damaged_after_packing_is_told_by_its_number(shards):
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


def test_pixels_that_have_changed_are_found_when_a_shard_is_first_read(tmp_path):
    pack_shards(write_images(tmp_path / "images", "jpg"), tmp_path / "shards", shard_bytes=900)
    shards = tmp_path / "shards"
    path, number = flip_a_pixel(shards)
    given = {"data_dir": shards, "image_size": 4, "mean": [0.5] * 3, "std": [0.2] * 3}
    with pytest.raises(ValueError, match=f"shards: the shard .*{path.name} does not match its ch"):
        load_shards(**given)[0].read(np.array([number]))
    train, _ = load_shards(**given, check=False)
    assert train.read(np.array([number]))[0].shape == (1, 4, 4, 3)  # decoded to other pixels
    assert (train.examined, train.verified, train.std.tolist()) == (True, True, given["std"])
    for wrong, words in (({"check": 1}, "check must be true or"), ({"window": 0}, "at least 1")):
        with pytest.raises((TypeError, ValueError), match=f"shards: .*{words}"):
            load_shards(**given, **wrong)
    order = load_shards(**given, window=1)[0].shuffled(3, 1)
    shard_of = {
        n: i for i, s in enumerate(read_index("", shards / "train").shards) for n in s.numbers
    }
    assert sorted(order) == list(range(16))
    assert (np.diff([shard_of[n] for n in order]) != 0).sum() == len(train.paths) - 1
    np.testing.assert_array_equal(train.shuffled(3, 1), permutation(3, 1, 16))


@each(
    ("change", "reason"),
    [
        (lambda c, s: s.update(name="../../../.bashrc.tar"), "plain names of files in .*/train, g"),
        (lambda c, s: s.update(name="/etc/passwd.tar"), "plain names of files in .*, got '/etc/pa"),
        (lambda c, s: s.update(name="a\0.tar"), r"plain names of files in .*, got 'a.x00.tar'"),
        (lambda c, s: s.update(name="..\\a.tar"), "plain names of files in"),
        (lambda c, s: s.update(name=7), "invalid names or numbers of the shard '7'"),
        (lambda c, s: s["labels"].__setitem__(0, 3), "invalid .* of the shard 'shard-000000.tar'"),
        (lambda c, s: s["labels"].__setitem__(1, -1), "invalid names or numbers"),
        (lambda c, s: s["labels"].__setitem__(1, True), "invalid names or numbers"),
        (lambda c, s: s["labels"].pop(), "invalid names or numbers"),
        (lambda c, s: s["sizes"].__setitem__(0, 10**30), "invalid names or numbers"),
        (lambda c, s: s["offsets"].__setitem__(0, s["nbytes"]), "invalid names or numbers"),
        (lambda c, s: s.pop("sizes"), "invalid names or numbers"),
        (lambda c, s: s.update(nbytes=-1), "invalid names or numbers"),
        (lambda c, s: s.update(nbytes=2**62), "invalid names or numbers"),
        (lambda c, s: c["shards"][1].update(name=s["name"]), "two shards have the same name"),
        (lambda c, s: s["numbers"].__setitem__(0, 99), "must have the numbers from 0, each once"),
        (lambda c, s: s["numbers"].__setitem__(0, 10**400), "the numbers from 0, each once"),
        (lambda c, s: c.update(samples=15), "must have the numbers from 0, each once"),
        (lambda c, s: c["shards"].clear(), "shards must be a list of objects"),
        (lambda c, s: c.update(class_names=["a", 3]), "class_names must be a list of names"),
        (lambda c, s: c.update(class_names=["a", "b", "c"]), "must have the classes of"),
    ],
)
def test_an_index_with_a_right_checksum_and_wrong_values_is_refused(tmp_path, change, reason):
    shards = tmp_path / "shards"
    pack_shards(write_images(tmp_path / "images"), shards, shard_bytes=SMALL)
    forge(shards, lambda content: change(content, content["shards"][0]))
    with pytest.raises(ValueError, match=reason) as error:
        load_shards(data_dir=shards)
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


def test_a_link_out_of_the_folder_is_not_read(shards, tmp_path):
    shard = shards / "train/shard-000000.tar"
    shard.rename(tmp_path / "secret.tar")
    shard.symlink_to(tmp_path / "secret.tar")
    with pytest.raises(ValueError, match="got .*shard-000000.tar, a link to .*/secret.tar; replac"):
        load_shards(data_dir=shards)
    shard.unlink()
    shard.symlink_to(shard)
    with pytest.raises(ValueError, match="shard-000000.tar.* link"):
        load_shards(data_dir=shards)


def test_the_commands_pack_and_verify(images, tmp_path, capsys):
    output = str(tmp_path / "out")
    arguments = ["pack", str(images), "--output", output, "--shard-size", "1KiB", "--threads=1"]
    assert main(arguments) == 0
    assert "train: 16 images in 3 shards, 0.0 MB" in capsys.readouterr().out
    assert main(["verify", output]) == 0
    assert "22 images in 4 shards match their checksums" in capsys.readouterr().out
    (images / "val" / "notes.txt").touch()
    assert main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["verify", str(images)]) == 1
    assert "index.json does not exist; specify a folder that" in capsys.readouterr().err


@each(("shards", "window"), [(7, 1), (7, 3), (1, 1), (5, 2)])
def test_samples_are_shuffled_within_windows_of_shuffled_shards(shards, window):
    sizes = np.arange(shards) % 3 + 20
    shard_of = np.repeat(np.arange(shards), sizes)
    order = window_permutation(5, 2, shard_of, window)
    np.testing.assert_array_equal(np.sort(order), np.arange(len(shard_of)))
    ends = np.cumsum(sizes[permutation(5, 2, shards, "shards")])
    ends = [*ends[window - 1 : -1 : window], len(order)]
    for part in np.split(order, ends[:-1]):  # each contains whole shards, mixed
        own = np.unique(shard_of[part])
        assert len(own) <= window
        assert len(part) == sizes[own].sum()
        assert len(own) == 1 or (np.diff(shard_of[part]) != 0).sum() > 2 * len(own)
    other = window_permutation(5, 3, shard_of, window)
    assert not np.array_equal(order, other)
    whole = window_permutation(9, 1, shard_of, shards)
    np.testing.assert_array_equal(whole, permutation(9, 1, len(shard_of)))
