"""Images in folders, one per class: the listing of the files, and the data set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.dataset import Dataset
from pydtnn.data.download import data_folder
from pydtnn.data.images import Decoder, EncodedImages, given_statistics
from pydtnn.data.order import split
from pydtnn.utils.files import read_file
from pydtnn.utils.validate import check_float

Array = NDArray[Any]

TRAIN = "train"
TEST = ("val", "validation", "test")
"""Sub-folders of the test set, in order of preference."""

SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True, eq=False)
class Images:
    """Files of images with their classes.

    Attributes
    ----------
    class_names : tuple of str
    paths : list of str
    labels : ndarray of int64
        The class of each file.
    """

    class_names: tuple[str, ...]
    paths: list[str]
    labels: NDArray[np.int64]

    def subset(self, indices: Array) -> Images:
        """Return the files at `indices`, with all classes."""
        return Images(self.class_names, [self.paths[i] for i in indices], self.labels[indices])


def load_folder(
    *,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    image_size: int | None = None,
    test_fraction: float | None = None,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    check: bool = True,
) -> tuple[Dataset, Dataset]:
    """Use PNG and JPEG images below `data_dir`, in one folder per class.

    They are in the sub-folders ``train`` and ``val`` (or ``validation``, or ``test``) of
    `data_dir`, or in `data_dir` itself, of which `test_fraction` is the test set. Classes are the
    sorted names of the folders. Files are listed here; they are decoded when they are read.

    Parameters
    ----------
    data_dir : path, optional
        See `pydtnn.data.load_dataset`.
    seed : int, default 0
        Of the choice of `test_fraction`.
    image_size : int, optional
        Height and width of the samples, see `Decoder`. By default that of the images, which must
        have the same.
    test_fraction : float, optional
        Fraction of the images in the test set, if there is no folder ``train``.
    channels : int, default 3
        1 for grey, 3 for colour, 4 for colour and transparency; images are converted.
    mean, std : sequence of float, optional
        Statistics per channel, for pixels from 0 to 1; by default measured before training.
    check : bool, default True
        Whether all images are decoded once before training, so that damaged ones are found. False
        has an effect if `image_size`, `mean` and `std` are given.

    Raises
    ------
    FileNotFoundError
        If a folder does not exist.
    ValueError
        If there are no images, fewer than two classes, other files, or classes that only the test
        set has.
    ImportError
        If Pillow is not installed.
    """
    decode = Decoder("folder", image_size, channels)
    statistics = given_statistics("folder", mean, std, channels)
    train, test = find_images("folder", data_folder(data_dir), test_fraction, seed)
    own = ImageFolder(decode, train, like=None, statistics=statistics, check=check)
    return own, ImageFolder(decode, test, like=own, statistics=None, check=check)


class ImageFolder(EncodedImages):
    """Images in files.

    Parameters
    ----------
    decode : Decoder
    images : Images
    like, statistics, check
        See `EncodedImages`.
    """

    def __init__(
        self,
        decode: Decoder,
        images: Images,
        **options: Any,
    ) -> None:
        self.paths = images.paths
        super().__init__(decode, images.labels, images.class_names, **options)

    def encoded(self, index: int) -> bytes:
        return read_file(self.name, self.paths[index])

    def place(self, index: int) -> str:
        return self.paths[index]


def find_images(
    who: str, root: Path, test_fraction: float | None = None, seed: int = 0
) -> tuple[Images, Images]:
    """List the files of a training and a test set, in the same order on every machine.

    Parameters
    ----------
    who : str
        First word of error messages.
    root : Path
    test_fraction, seed
        See `load_folder`.

    Returns
    -------
    (Images, Images)
        With the classes of the training set.

    Raises
    ------
    FileNotFoundError, ValueError
        As `load_folder`.
    """
    if not root.is_dir():
        raise FileNotFoundError(
            f"{who}: the folder {root} does not exist; specify a folder that contains the images "
            "of each class in one sub-folder, or train and val with such folders"
        )
    if not (root / TRAIN).is_dir():
        return _divide(who, root, test_fraction, seed)
    if test_fraction is not None:
        raise ValueError(
            f"{who}: test_fraction divides a folder without {TRAIN}, and {root} contains one; omit "
            "test_fraction"
        )
    parts = [root / name for name in TEST if (root / name).is_dir()]
    if not parts:
        raise ValueError(
            f"{who}: {root} contains {TRAIN}, but no {', '.join(TEST[:-1])} or {TEST[-1]} for the "
            "test set; add one of them"
        )
    train, test = _list(who, root / TRAIN, 2), _list(who, parts[0], 1)
    numbers = {name: number for number, name in enumerate(train.class_names)}
    for name in test.class_names:
        if name not in numbers:
            raise ValueError(
                f"{who}: {parts[0]} contains the class {name}, which {root / TRAIN} does not "
                "contain; remove it there or add it here"
            )
    table = np.array([numbers[name] for name in test.class_names], np.int64)
    return train, Images(train.class_names, test.paths, table[test.labels])


def _divide(who: str, root: Path, test_fraction: float | None, seed: int) -> tuple[Images, Images]:
    """List the images of one folder, and divide them at random."""
    if test_fraction is None:
        raise ValueError(
            f"{who}: {root} contains no {TRAIN}; add {TRAIN} and {TEST[0]}, or set test_fraction, "
            "the part of the images to test on, such as 0.1"
        )
    fraction = check_float(who, "test_fraction", test_fraction, above=0, below=1)
    images = _list(who, root, 2)
    rest, held = split(len(images.paths), fraction, seed)
    train, test = images.subset(rest), images.subset(held)
    present = np.bincount(train.labels, minlength=len(images.class_names)) > 0
    if not present.all():
        name = images.class_names[int(np.argmin(present))]
        raise ValueError(
            f"{who}: with test_fraction {fraction:g} no image of the class {name} is left for "
            "training; use a smaller fraction, or add images"
        )
    return train, test


def _list(who: str, folder: Path, least: int) -> Images:
    """List the images of one sub-folder per class; there must be at least so many classes."""
    names: list[str] = []
    paths: list[str] = []
    labels: list[int] = []
    for entry in _entries(folder):
        if not entry.is_dir():
            raise ValueError(
                f"{who}: expected only sub-folders with the images of one class each in {folder}, "
                f"got the file {entry.name}; move it to another place"
            )
        found = list(image_files(who, entry.path))
        if not found:
            raise ValueError(
                f"{who}: expected PNG or JPEG images in {entry.path}, got none; add images, or "
                "remove the folder"
            )
        labels += [len(names)] * len(found)
        names.append(entry.name)
        paths += found
    if len(names) < least:
        given = f"only the class {names[0]}" if names else "none"
        raise ValueError(
            f"{who}: expected PNG or JPEG images of at least {least} class{'es' * (least > 1)} in "
            f"sub-folders of {folder}, got {given}; add one sub-folder per class"
        )
    return Images(tuple(names), paths, np.array(labels, np.int64))


def image_files(who: str, folder: str) -> Iterator[str]:
    """Yield the images in a folder and the folders in it, by name.

    Raises
    ------
    ValueError
        If there are other files that are not hidden.
    """
    for entry in _entries(folder):
        if entry.is_dir():
            yield from image_files(who, entry.path)
        elif entry.name.lower().endswith(SUFFIXES):
            yield entry.path
        else:
            raise ValueError(
                f"{who}: expected only PNG and JPEG images (.png, .jpg, .jpeg), got the file "
                f"{entry.path}; move it to another place"
            )


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder by name, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
