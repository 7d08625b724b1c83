from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from pydtnn.comm import run_threads
from pydtnn.data import load_dataset, load_folder
from pydtnn.training.examination import examine
from pydtnn.utils.errors import AgreedError
from tests.data.image_files import CLASSES, image, pixels_of, read_all, write_image, write_images
from tests.each import each


@each(("suffix", "test"), [("png", "val"), ("jpeg", "validation"), ("PNG", "test")])
def test_images_have_the_classes_of_their_folders(tmp_path, suffix, test):
    root = write_images(tmp_path, suffix)
    (root / "val").rename(root / test)
    for part, data in zip(("train", test), load_dataset("folder", root), strict=True):
        x, y = read_all(data)
        expected = pixels_of(root / part)
        np.testing.assert_array_equal(x, expected[0])
        np.testing.assert_array_equal(y, expected[1])
        assert (data.classes, data.class_names) == (3, CLASSES)
        assert (data.name, data.input_shape, data.examined) == ("folder", (6, 5, 3), False)
        indices = np.array([5, 2, 2])
        part, labels = data.read(indices)
        part_before = part.copy()
        part[:] = 0  # a new array
        np.testing.assert_array_equal(data.read(indices)[0], x[indices])
        np.testing.assert_array_equal(part_before, x[indices])
        np.testing.assert_array_equal(labels, data.read_targets(indices))


def test_images_that_are_kept_are_the_same_and_are_not_decoded_again(tmp_path, monkeypatch):
    root, options = write_images(tmp_path), {"image_size": 4, "check": False}
    data = load_folder(data_dir=root, keep="0.5 kB", **options)[0]  # 10 images of 48 B
    first, decoded, encoded = read_all(data)[0], [], data.encoded
    first[0] += 1  # a copy
    monkeypatch.setattr(data, "encoded", lambda i: decoded.append(i) or encoded(i))
    expected = read_all(load_folder(data_dir=root, **options)[0])[0]
    np.testing.assert_array_equal(read_all(data)[0], expected)
    assert decoded == [*range(10, 16)]
    with pytest.raises(ValueError, match="folder: keep: expected a number with a unit"):
        load_folder(data_dir=root, keep="2", **options)


def test_images_in_folders_of_a_class_and_links_are_found_and_hidden_files_are_not(tmp_path):
    root = write_images(tmp_path)
    deeper = root / "train" / "ant" / "deeper"
    deeper.mkdir()
    (root / "train" / "ant" / ".DS_Store").write_text("hidden")
    (root / "train" / ".cache").mkdir()
    (deeper / "link.png").symlink_to(root / "val" / "ant" / "0.png")
    train, test = load_folder(data_dir=root)
    labels = read_all(train)[1]
    np.testing.assert_array_equal(np.bincount(labels), [6, 7, 4])
    np.testing.assert_array_equal(train.read(np.array([5]))[0], test.read(np.array([0]))[0])


def test_images_of_any_size_are_resized_on_request(tmp_path):
    root = write_images(tmp_path)
    write_image(root / "val" / "bee" / "9.jpg", np.zeros((30, 20), np.uint8))
    shutil.rmtree(root / "val" / "ant")
    train, test = load_folder(data_dir=root, image_size=4, channels=1)
    assert read_all(train)[0].shape == (16, 4, 4, 1)
    assert read_all(test)[0].shape == (5, 4, 4, 1)
    np.testing.assert_array_equal(test.labels, [1, 1, 1, 1, 2])  # as in training
    with pytest.raises(ValueError, match=r"6 x 5 pixels, .* got 30 x 20 in .*bee/9\.jpg; set"):
        read_all(load_folder(data_dir=root)[1])


def test_one_level_of_folders_is_divided_by_the_seed(tmp_path):
    root = write_images(tmp_path) / "train"
    sets = [load_folder(data_dir=root, test_fraction=0.25, seed=seed) for seed in (1, 1, 2)]
    everything = pixels_of(root)[0]
    for train, test in sets:
        assert (len(train), len(test)) == (12, 4)
        both = np.concatenate([read_all(train)[0], read_all(test)[0]])
        rows = sorted(row.tobytes() for row in both)
        assert rows == sorted(row.tobytes() for row in everything)
    with pytest.raises(ValueError, match=r"no image of the class \w+ is left for training; use"):
        load_folder(data_dir=root, test_fraction=0.95)
    first, again, other = (read_all(test)[0] for _, test in sets)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_statistics_are_those_of_the_training_set_or_given(tmp_path):
    root = write_images(tmp_path)
    train, test = load_folder(data_dir=root)
    x = pixels_of(root / "train")[0]
    np.testing.assert_allclose(train.mean, x.mean((0, 1, 2)) / 255, rtol=1e-13)
    assert test.statistics is train.statistics
    given = {"mean": [0.5, 0.25, 0.125], "std": [0.1, 0.2, 0.3]}
    train, test = load_folder(data_dir=root, **given)
    assert (train.mean.tolist(), test.std.tolist()) == (given["mean"], given["std"])
    assert not train.examined
    parts = load_folder(data_dir=root, image_size=3, check=False, **given)
    assert [part.examined for part in parts] == [True, True]
    assert not load_folder(data_dir=root, image_size=3, check=False)[0].examined


@each(
    ("removed", "written", "options", "reason"),
    [
        (".", None, {}, "the folder .* does not exist; specify a folder that contains"),
        (None, "train/notes.txt", {}, "train/notes.txt is beside the folders of classes; move"),
        (None, "val/cat/a.gif", {}, "val/cat/a.gif is not named as a PNG"),
        ("train/[ab]*", None, {}, "at least 2 classes .*, got only the class cat; add"),
        ("train/*", None, {}, "at least 2 classes .*, got none; add"),
        (None, "train/dog/", {}, "train/dog has no PNG, JPEG or WebP images; add"),
        (None, "val/dog/0.png", {}, "val contains the class dog, which .*train does not contain"),
        ("val", None, {}, "contains train, but no val, validation or test for the test set; add"),
        ("train", None, {}, "contains no train; add train and val, or set test_fraction, "),
        (None, None, {"test_fraction": 0.1}, "test_fraction divides a folder without train, and "),
        ("train", None, {"test_fraction": 1.5}, "test_fraction must be above 0 and below 1"),
        (None, None, {"mean": [0.5]}, "must both be lists of 3 numbers, .* got mean .0.5."),
        (None, None, {"mean": [0.5] * 3, "std": [1, 1, 0]}, "std must be above 0 and at most 1"),
    ],
)
def test_a_folder_that_cannot_be_used_is_told_in_one_sentence(
    tmp_path, removed, written, options, reason
):
    root = write_images(tmp_path / "data")
    for path in tmp_path.glob(f"data/{removed}") if removed else ():
        shutil.rmtree(path)
    if written:
        (root / written).parent.mkdir(exist_ok=True)
        (root / written).mkdir() if written[-1] == "/" else (root / written).write_bytes(b"text")
    with pytest.raises((ValueError, FileNotFoundError), match=f"^folder: .*{reason}") as error:
        load_folder(data_dir=root, **options)
    assert "\n" not in str(error.value)


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """Images of three classes, and files of many kinds that cannot be used."""
    root = write_images(tmp_path / "data", shape=(6, 6, 3))
    (root / "train/dog").mkdir()
    (root / "train/Thumbs.db").write_bytes(b"text")
    (root / "train/ant/a.bmp").write_bytes(b"BM")
    (root / "val/bee/a.gif").write_bytes(b"GIF89a")
    (root / "train/ant/.hidden").write_bytes(b"text")
    write_image(root / "train/bee/5.webp", np.zeros((6, 6, 3), np.uint8))
    write_image(root / "train/cat/5.png", np.zeros((6, 6), np.uint16))
    whole = (root / "train/bee/0.png").read_bytes()
    (root / "train/cat/cut.png").write_bytes(whole[:-40])
    (root / "val/ant/empty.jpg").write_bytes(b"")
    return root


LISTED = ("train/Thumbs.db is beside", "train/ant/a.bmp is not named as", "train/dog has no PNG")
LISTED += ("val/bee/a.gif is not named as a PNG",)
DAMAGED = ("image {}/train/cat/cut.png is damaged", "WebP image in {}/val/ant/empty.jpg")


def test_all_bad_files_are_named_at_once(messy):
    with pytest.raises(ValueError, match="4 files cannot be used: .*set skip_bad") as error:
        load_folder(data_dir=messy)
    for part in LISTED:
        assert f"{messy}/{part}" in str(error.value)


def test_bad_files_are_omitted_if_this_is_set(messy, caplog):
    train, test = load_folder(data_dir=messy, skip_bad=True)
    (line,) = caplog.messages
    for part in (*(f"{messy}/{part}" for part in LISTED), *(p.format(messy) for p in DAMAGED)):
        assert part in line
    assert (len(train), len(test), train.class_names) == (18, 6, CLASSES)
    assert len(read_all(train)[0]) == 18


@pytest.mark.tools
def test_bad_files_are_not_packed_if_this_is_set(messy):
    from pydtnn.tools.shards import load_shards, pack_shards

    packed = pack_shards(messy, messy / "../shards", skip_bad=True)
    assert [part.samples for part in packed] == [18, 6]
    shards, _ = load_shards(data_dir=messy / "../shards")
    train, _ = load_folder(data_dir=messy, skip_bad=True)
    np.testing.assert_array_equal(read_all(shards)[0], read_all(train)[0])


@each("size", [1, 2])
def test_the_examination_names_all_damaged_images(tmp_path, size):
    root = write_images(tmp_path)
    for part in ("train/ant/3.png", "train/cat/0.png", "train/cat/3.png"):
        (root / part).write_bytes((root / part).read_bytes()[:-40])
    data, _ = load_folder(data_dir=root)
    with pytest.raises(AgreedError) as error:
        run_threads(size, lambda comm: examine(comm, data))
    for part in ("train/ant/3.png", "train/cat/0.png", "train/cat/3.png"):
        assert str(error.value).count(f"the image {root}/{part} is damaged") == 1


def test_names_of_classes_have_one_form_of_unicode(tmp_path):
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    for name in (f"train/{decomposed}", f"val/{composed}", "train/caff", "val/caff"):
        write_image(tmp_path / name / "0.png", np.zeros((4, 4), np.uint8))
    train, test = load_folder(data_dir=tmp_path)
    assert train.class_names == test.class_names == ("caff", composed)
    np.testing.assert_array_equal(test.labels, [0, 1])
    write_image(tmp_path / "train" / composed / "1.png", np.zeros((4, 4), np.uint8))
    assert load_folder(data_dir=tmp_path)[0].labels.tolist() == [0, 1, 1]


@pytest.mark.parametrize("load", [load_folder, pytest.param("packed", marks=pytest.mark.tools)])
def test_photographs_are_turned_unless_this_is_switched_off(tmp_path, load):
    root, metadata = write_images(tmp_path / "data"), image.Exif()
    metadata[0x0112] = 3
    pixels = np.arange(90, dtype=np.uint8).reshape(6, 5, 3)
    write_image(root / "train/ant/0.png", pixels, exif=metadata)
    folder = root
    if load == "packed":
        from pydtnn.tools.shards import load_shards, pack_shards

        pack_shards(root, tmp_path / "shards")
        load, folder = load_shards, tmp_path / "shards"
    for options, expected in (({}, pixels[::-1, ::-1]), ({"exif_rotation": False}, pixels)):
        np.testing.assert_array_equal(load(data_dir=folder, **options)[0].read([0])[0][0], expected)
