"""CIFAR-10 and CIFAR-100: 50,000 and 10,000 colour photographs of 32 x 32 pixels.

Krizhevsky, "Learning multiple layers of features from tiny images" (2009). Both the binary and the
Python version are read. Files contain the colour planes of an image one after the other; they are
interleaved once when loading, because that takes several times longer than reading an image.
"""

from __future__ import annotations

import os
import pickletools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.array import ArrayDataset
from pydtnn.data.dataset import Dataset
from pydtnn.data.download import DiskLayout, SourceFile, locate
from pydtnn.utils.files import read_file
from pydtnn.utils.names import unknown

Array = NDArray[Any]

_TEN = "airplane automobile bird cat deer dog frog horse ship truck"

_FINE = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach
    couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster
    house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road
    rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
    streetcar sunflower sweet_pepper table tank telephone television tiger tractor train
    trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

_COARSE = """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables
    household_electrical_devices household_furniture insects large_carnivores
    large_man-made_outdoor_things large_natural_outdoor_scenes
    large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles
    small_mammals trees vehicles_1 vehicles_2
"""

NAMES_10 = tuple(_TEN.split())
"""By label."""

NAMES_100 = {"fine": tuple(_FINE.split()), "coarse": tuple(_COARSE.split())}
"""By kind of labels; both in alphabetical order, which is that of the labels."""


SIDE, CHANNELS = 32, 3
PIXELS = CHANNELS * SIDE * SIDE
CHUNK_IMAGES = 100  # images that fit in the cache while their planes are interleaved
BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))

LAYOUTS_10 = (
    DiskLayout(("cifar-10-batches-bin", "."), (*(f"{b}.bin" for b in BATCHES), "test_batch.bin")),
    DiskLayout(("cifar-10-batches-py", "."), (*BATCHES, "test_batch")),
)
LAYOUTS_100 = (
    DiskLayout(("cifar-100-binary", "."), ("train.bin", "test.bin")),
    DiskLayout(("cifar-100-python", "."), ("train", "test")),
)
SITE = "https://www.cs.toronto.edu/~kriz"
SOURCE_10 = SourceFile(
    f"{SITE}/cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "cifar-10-batches-bin",
    (*LAYOUTS_10[0].files, "batches.meta.txt"),
)
SOURCE_100 = SourceFile(
    f"{SITE}/cifar-100-binary.tar.gz",
    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    "cifar-100-binary",
    (*LAYOUTS_100[0].files, "fine_label_names.txt", "coarse_label_names.txt"),
)
COUNTS_10, COUNTS_100 = (*[10_000] * 5, 10_000), (50_000, 10_000)
"""Images in each file."""

KEYS = {b"data", b"labels", b"fine_labels", b"coarse_labels", b"filenames", b"batch_label"}
"""Keys of the dictionary in a file of the Python version."""

NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
STRINGS = ("STRING", "UNICODE", "BYTES", "UNICODE8", "BYTES8", "BYTEARRAY8")
"""Instructions of pickles, and what the names of others end in."""

LABELS_100 = {"coarse": 20, "fine": 100}
"""The labels of a CIFAR-100 image, in the order of the binary file, and their classes."""


def load_cifar10(
    *,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = False,
    any_size: bool = False,
) -> tuple[Dataset, Dataset]:
    """Read CIFAR-10 from `data_dir` or ``cifar-10-batches-bin`` or ``cifar-10-batches-py`` in it.

    Parameters
    ----------
    data_dir, download
        See `pydtnn.data.load_dataset`.
    any_size : bool, default False
        Whether files may contain fewer or more images than the 10,000 of the original ones.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If a file is truncated, does not contain CIFAR images, has another number of them or invalid
        labels.
    """
    layout, paths = locate("cifar10", LAYOUTS_10, data_dir, (SOURCE_10,) if download else ())
    if layout == 0:
        files = [_read_binary("cifar10", path, 1, 0, 10) for path in paths]
    else:
        files = [_read_python("cifar10", path, "labels", 10) for path in paths]
    if not any_size:
        _check_counts("cifar10", paths, files, COUNTS_10)
    return _split("cifar10", files, NAMES_10)


def load_cifar100(
    *,
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = False,
    labels: str = "fine",
    any_size: bool = False,
) -> tuple[Dataset, Dataset]:
    """Read CIFAR-100 from `data_dir` or ``cifar-100-binary`` or ``cifar-100-python`` in it.

    Parameters
    ----------
    labels : "fine" or "coarse", default "fine"
        The 100 classes, or the 20 groups of them.
    any_size : bool, default False
        Whether files may contain fewer or more images than the 50,000 and 10,000 of the original
        ones.

    Raises
    ------
    FileNotFoundError, ValueError
        As `load_cifar10`.
    """
    if labels not in LABELS_100:
        raise ValueError(f"cifar100: {unknown('kind of labels', labels, LABELS_100)}")
    layout, paths = locate("cifar100", LAYOUTS_100, data_dir, (SOURCE_100,) if download else ())
    classes, column = LABELS_100[labels], list(LABELS_100).index(labels)
    if layout == 0:
        files = [_read_binary("cifar100", path, 2, column, classes) for path in paths]
    else:
        files = [_read_python("cifar100", path, f"{labels}_labels", classes) for path in paths]
    if not any_size:
        _check_counts("cifar100", paths, files, COUNTS_100)
    return _split("cifar100", files, NAMES_100[labels])


def _check_counts(
    name: str, paths: list[Path], files: list[tuple[Array, Array]], counts: Sequence[int]
) -> None:
    """Raise ValueError if files are truncated between two images, which no other check detects."""
    for path, (_, labels), count in zip(paths, files, counts, strict=True):
        if len(labels) != count:
            raise ValueError(
                f"{name}: {path} must contain {count} images, got {len(labels)}; download the file "
                "again, or set any_size=True (--dataset NAME:any_size=true) if that "
                "number is intended"
            )


def _split(
    name: str, files: list[tuple[Array, Array]], names: tuple[str, ...]
) -> tuple[Dataset, Dataset]:
    """Create the training set from all files but the last, and the test set from the last."""
    train = _dataset(name, files[:-1], names)
    return train, _dataset(name, files[-1:], names, train)


def _dataset(
    name: str, files: list[tuple[Array, Array]], names: tuple[str, ...], like: Dataset | None = None
) -> Dataset:
    labels = np.concatenate([labels for _, labels in files])
    x = np.empty((len(labels), SIDE, SIDE, CHANNELS), np.uint8)
    first = 0
    for pixels, _ in files:
        for start in range(0, len(pixels), CHUNK_IMAGES):
            planes = pixels[start : start + CHUNK_IMAGES].reshape(-1, CHANNELS, SIDE, SIDE)
            # Three times faster than one transposed copy with an inner loop of length C.
            for c in range(CHANNELS):
                x[first : first + len(planes), ..., c] = planes[:, c]
            first += len(planes)
    return ArrayDataset(x, labels, class_names=names, like=like, name=name)


def _read_binary(
    name: str, path: Path, label_bytes: int, column: int, classes: int
) -> tuple[Array, Array]:
    """Read a file of records: labels, then pixels.

    It is not mapped into memory: truncation of a mapped file would terminate the process.
    """
    record, data = label_bytes + PIXELS, np.frombuffer(read_file(name, path), np.uint8)
    if len(data) == 0 or len(data) % record:
        raise ValueError(
            f"{name}: {path} must contain records of {record} bytes, got {len(data)} bytes; the "
            "file is truncated or has another format: delete it and download it again"
        )
    records = data.reshape(-1, record)
    return records[:, label_bytes:], _checked(name, path, records[:, column], classes)


def _read_python(name: str, path: Path, key: str, classes: int) -> tuple[Array, Array]:
    """Read the strings and numbers in a pickled dictionary, without executing it.

    After a key follow the numbers of a list, or the parts of an array, of which the longest are its
    bytes.
    """
    entry, data = b"", b""
    labels: list[Any] = []
    value: Any
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the strings of a damaged pickle
            for instruction, value, _ in pickletools.genops(read_file(name, path)):
                if instruction.name in NUMBERS and entry == key.encode():
                    labels.append(value)
                elif instruction.name.endswith(STRINGS):
                    text = value.encode("latin1") if isinstance(value, str) else bytes(value)
                    entry = text if text in KEYS else entry
                    data = max(data, text, key=len) if entry == b"data" else data
    except ValueError as error:
        raise ValueError(
            f"{name}: {path} cannot be read as a pickle ({' '.join(str(error).split())[:200]}); "
            "download it again"
        ) from error
    if not data or len(data) % PIXELS:
        raise ValueError(
            f"{name}: {path} must contain 'data' of {PIXELS} bytes per image; download it again"
        )
    pixels = np.frombuffer(data, np.uint8).reshape(-1, PIXELS)
    if len(labels) != len(pixels):
        raise ValueError(
            f"{name}: {path} must contain one label per image, got {len(pixels)} images and "
            f"{len(labels)} labels; download it again"
        )
    return pixels, _checked(name, path, labels, classes)


def _checked(
    name: str, path: Path, labels: Sequence[int] | Array, classes: int
) -> NDArray[np.int64]:
    wrong = next((label for label in labels if not 0 <= label < classes), None)
    if wrong is not None:
        raise ValueError(
            f"{name}: labels in {path} must be in 0..{classes - 1}, got {wrong}; the file is "
            "damaged or belongs to another data set: download it again"
        )
    return np.array(labels, np.int64)
