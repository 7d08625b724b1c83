"""Images in folders, one per class: the listing of the files, and the data set."""

from __future__ import annotations

import logging
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.dataset import Dataset
from pydtnn.data.download import data_folder
from pydtnn.data.images import (
    KEEP,
    KINDS,
    SUFFIXES,
    Decoder,
    EncodedImages,
    name_bad,
    user_statistics,
)
from pydtnn.data.order import split
from pydtnn.utils.files import read_file
from pydtnn.utils.launcher import is_first_on_host
from pydtnn.utils.machine import default_threads
from pydtnn.utils.validate import check_bool, check_float

Array = NDArray[Any]

TRAIN = "train"
TEST = ("val", "validation", "test")
"""Sub-folders of the test set, in order of preference."""

OPTION = "set skip_bad (--dataset folder:skip_bad=true) to train without them"

_log = logging.getLogger("pydtnn.data")


@dataclass(frozen=True, eq=False)
class ImageFiles:
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

    def subset(self, indices: Array) -> ImageFiles:
        """Return the files at `indices`, with all classes."""
        return ImageFiles(self.class_names, [self.paths[i] for i in indices], self.labels[indices])


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
    skip_bad: bool = False,
    exif_rotation: bool = True,
    keep: str = KEEP,
) -> tuple[Dataset, Dataset]:
    """Use PNG, JPEG and WebP images below `data_dir`, in one folder per class.

    They are in the sub-folders ``train`` and ``val`` (or ``validation``, or ``test``) of
    `data_dir`, or in `data_dir` itself, of which `test_fraction` is the test set. Classes are the
    sorted names of the folders, in Unicode's composed form (NFC), so that they are the same on all
    file systems. Files are listed here; they are decoded when they are read.

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
    skip_bad : bool, default False
        Whether other files, damaged images and empty folders are omitted, and named in a warning;
        all files are decoded here then. By default they raise one error, with what to do.
    exif_rotation : bool, default True
        Whether photographs are turned to the orientation in their metadata.
    keep : str, default "0 B"
        Size of the decoded images that each process keeps in memory for later epochs, such as
        "2 GiB", of the training and of the test set each: results are the same.

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
    decode = Decoder("folder", image_size, channels, exif_rotation)
    statistics = user_statistics("folder", mean, std, channels)
    skip = decode if check_bool("folder", "skip_bad", skip_bad) else None
    train, test = find_images("folder", data_folder(data_dir), test_fraction, seed, skip)
    options: dict[str, Any] = {"check": check, "keep": keep}
    own = ImageFolder(decode, train, like=None, statistics=statistics, **options)
    return own, ImageFolder(decode, test, like=own, statistics=None, **options)


class ImageFolder(EncodedImages):
    """Images in files.

    Parameters
    ----------
    decode : Decoder
    images : Images
    like, statistics, check, keep
        See `EncodedImages`.
    """

    def __init__(self, decode: Decoder, images: ImageFiles, **options: Any) -> None:
        self.paths = images.paths
        super().__init__(decode, images.labels, images.class_names, **options)

    def encoded(self, index: int) -> bytes:
        return read_file(self.name, self.paths[index])

    def place(self, index: int) -> str:
        return self.paths[index]


def find_images(
    who: str,
    root: Path,
    test_fraction: float | None,
    seed: int,
    skip: Decoder | None,
) -> tuple[ImageFiles, ImageFiles]:
    """List the files of a training and a test set, in the same order on every machine.

    Parameters
    ----------
    who : str
        First word of error messages.
    root : Path
    test_fraction, seed
        See `load_folder`.
    skip : Decoder, optional
        Files that it cannot decode are omitted, as all that are not images.

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
        return _divide(who, root, test_fraction, seed, skip)
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
    train, test = _list(who, {root / TRAIN: 2, parts[0]: 1}, skip)
    numbers = {name: number for number, name in enumerate(train.class_names)}
    for name in test.class_names:
        if name not in numbers:
            raise ValueError(
                f"{who}: {parts[0]} contains the class {name}, which {root / TRAIN} does not "
                "contain; remove it there or add it here"
            )
    table = np.array([numbers[name] for name in test.class_names], np.int64)
    return train, ImageFiles(train.class_names, test.paths, table[test.labels])


def _divide(
    who: str, root: Path, test_fraction: float | None, seed: int, skip: Decoder | None
) -> tuple[ImageFiles, ImageFiles]:
    """List the images of one folder, and divide them at random."""
    if test_fraction is None:
        raise ValueError(
            f"{who}: {root} contains no {TRAIN}; add {TRAIN} and {TEST[0]}, or set test_fraction, "
            "the part of the images to test on, such as 0.1"
        )
    fraction = check_float(who, "test_fraction", test_fraction, above=0, below=1)
    (images,) = _list(who, {root: 2}, skip)
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


def _list(who: str, folders: Mapping[Path, int], skip: Decoder | None) -> list[ImageFiles]:
    """List the images of folders with one sub-folder per class; each has at least so many."""
    bad: list[str] = []
    lists = [_examine(who, folder, skip, bad) for folder in folders]
    if bad and skip is None:
        raise ValueError(f"{who}: {name_bad(bad)}; or {OPTION}")
    if bad and is_first_on_host():
        _log.warning("%s: %s; training continues without", who, name_bad(bad))
    for (folder, least), images in zip(folders.items(), lists, strict=True):
        if len(names := images.class_names) < least:
            given = f"only the class {names[0]}" if names else "none"
            raise ValueError(
                f"{who}: expected {KINDS} images of at least {least} class{'es' * (least > 1)} in "
                f"sub-folders of {folder}, got {given}; add one sub-folder per class"
            )
    return lists


def _examine(who: str, folder: Path, decode: Decoder | None, problems: list[str]) -> ImageFiles:
    """List the images of one sub-folder per class, which are decoded if a decoder is given.

    What is wrong with other files, and what to do, is added to `problems`.
    """
    names: list[str] = []
    paths: list[str] = []
    labels: list[int] = []
    with ThreadPoolExecutor(default_threads()) as pool:
        mapped = map if decode is None else pool.map
        for entry in _entries(folder):
            files = list(_files(entry.path)) if entry.is_dir() else []
            reasons = list(mapped(partial(_problem, who, decode), files))
            found = [path for path, why in zip(files, reasons, strict=True) if not why]
            problems += filter(None, reasons)
            if not found:
                what = f"has no {KINDS} images; add some, or remove it"
                if not entry.is_dir():
                    what = "is beside the folders of classes; move it to another place"
                problems.append(f"{entry.path} {what}")
                continue
            name = unicodedata.normalize("NFC", entry.name)
            if name not in names[-1:]:
                names.append(name)
            labels += [len(names) - 1] * len(found)
            paths += found
    return ImageFiles(tuple(names), paths, np.array(labels, np.int64))


def _problem(who: str, decode: Decoder | None, path: str) -> str:
    """Return what is wrong with a file; empty if it is an image."""
    if not path.lower().endswith(SUFFIXES):
        return f"{path} is not named as a {KINDS} image; convert it, or move it to another place"
    try:
        if decode is not None:
            decode(read_file(who, path), path)
    except (OSError, ValueError) as error:
        return str(error).removeprefix(f"{who}: ")
    return ""


def image_files(who: str, folder: str) -> list[str]:
    """Return the images in a folder and the folders in it, by name.

    Raises
    ------
    ValueError
        If there are other files that are not hidden.
    """
    found = list(_files(folder))
    if problems := [why for path in found if (why := _problem(who, None, path))]:
        raise ValueError(f"{who}: {name_bad(problems)}")
    return found


def _files(folder: str) -> Iterator[str]:
    """Yield the files in a folder and the folders in it, by name, without hidden ones."""
    for entry in _entries(folder):
        if entry.is_dir():
            yield from _files(entry.path)
        else:
            yield entry.path


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder by name, without hidden ones."""
    with os.scandir(folder) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".")]
    return sorted(shown, key=lambda entry: unicodedata.normalize("NFC", entry.name))
