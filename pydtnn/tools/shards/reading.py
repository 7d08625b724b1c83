"""Images in shards: tar files that each rank reads in parts, by the offsets in their index."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.dataset import Dataset
from pydtnn.data.download import data_folder
from pydtnn.data.folder import TRAIN
from pydtnn.data.images import KEEP, Decoder, EncodedImages, user_statistics
from pydtnn.data.order import order_keys, permutation
from pydtnn.utils.files import open_file, parse_object, path_inside, read_file, write_file
from pydtnn.utils.validate import check_bool, check_int

INDEX, VERSION, SUFFIX = "index.json", 1, ".tar"

COLUMNS = ("numbers", "labels", "offsets", "sizes")
"""Entries of a shard with a value for each image."""

MAX_NUMBER = 2**62
"""Largest length of a file."""

PART_BYTES = 4 << 20
"""Bytes of a shard that are read at once to compare it with its checksum."""

REPAIR = "copy it again, or pack the images again with python -m pydtnn data pack"


@dataclass(frozen=True)
class ShardFile:
    """A tar file with images and their classes.

    Attributes
    ----------
    name : str
    nbytes : int
        Length of the file, in B.
    sha256 : str
        Checksum of the file, in hexadecimal digits.
    numbers : sequence of int
        Number of each image in the data set, in the order of the file.
    labels, offsets, sizes : sequence of int
        Class of each image, and the place of its bytes in the file, in B.
    """

    name: str
    nbytes: int
    sha256: str
    numbers: Sequence[int]
    labels: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]


@dataclass(frozen=True)
class Index:
    """The shards of a training or test set.

    Attributes
    ----------
    class_names : tuple of str
    shards : tuple of ShardFile
    """

    class_names: tuple[str, ...]
    shards: tuple[ShardFile, ...]

    @property
    def samples(self) -> int:
        """Number of images."""
        return sum(len(shard.numbers) for shard in self.shards)


def write_index(who: str, folder: Path, index: Index) -> None:
    """Write an index, with a checksum of its own, when all shards are complete."""
    content = {
        "format": VERSION,
        "samples": index.samples,
        "class_names": index.class_names,
        "shards": [asdict(shard) for shard in index.shards],
    }
    text = _text({**content, "sha256": _digest(content)})
    write_file(who, folder / INDEX, text.encode())


def read_index(who: str, folder: Path) -> Index:
    """Read an index, and check it and the lengths of the shards.

    Raises
    ------
    FileNotFoundError
        If the index or a shard is missing.
    ValueError
        If the index has changed, names a file outside of the folder, has values that do not fit
        each other, or a shard has another length.
    """
    path = folder / INDEX
    try:
        content = parse_object(read_file(who, path), "it", VERSION)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{who}: {path} does not exist; specify a folder that python -m pydtnn data pack has "
            "completed"
        ) from error
    except ValueError as error:
        raise ValueError(f"{who}: {path} cannot be used: {error}; {REPAIR}") from error
    if content.pop("sha256", None) != _digest(content):
        raise ValueError(f"{who}: {path} does not match the checksum in it; {REPAIR}")
    problem = _problem(content)
    if problem:
        raise ValueError(f"{who}: {path} cannot be used: {problem}; {REPAIR}")
    index = Index(
        tuple(content["class_names"]), tuple(ShardFile(**shard) for shard in content["shards"])
    )
    for shard in index.shards:
        _check_length(who, path_inside(who, folder, shard.name), shard.nbytes)
    return index


def _problem(content: Mapping[str, Any]) -> str:
    """Return what is wrong with the values of an index; empty if they are consistent."""
    classes, shards = content.get("class_names"), content.get("shards")
    if not _are(str, classes) or not classes:
        return "class_names must be a list of names"
    if not _are(dict, shards) or not shards:
        return "shards must be a list of objects"
    wrong = [shard for shard in shards if not _fits(shard, len(classes))]
    if wrong:
        return f"invalid names or numbers of the shard {str(wrong[0].get('name'))!r:.100}"
    if len({shard["name"] for shard in shards}) < len(shards):
        return "two shards have the same name"
    numbers = sorted(number for shard in shards for number in shard["numbers"])
    if numbers != [*range(len(numbers))] or content.get("samples") != len(numbers):
        return "images must have the numbers from 0, each once"
    return ""


def _fits(shard: Mapping[str, Any], classes: int) -> bool:
    """Return whether a shard has all entries, of which the columns fit each other."""
    if shard.keys() != {field.name for field in fields(ShardFile)}:
        return False
    size, columns = shard["nbytes"], [shard[key] for key in COLUMNS]
    return (
        _are(str, [shard["name"], shard["sha256"]])
        and shard["name"].endswith(SUFFIX)
        and type(size) is int
        and all(_are(int, column) and column and min(column) >= 0 for column in columns)
        and len({*map(len, columns)}) == 1
        and max(shard["labels"]) < classes
        and all(map(size.__ge__, map(int.__add__, shard["offsets"], shard["sizes"])))
        and size < MAX_NUMBER
    )


def _are(kind: type, values: Any) -> bool:
    """Return whether a value is a list of elements of exactly this type."""
    return isinstance(values, list) and {*map(type, values)} <= {kind}


def _check_length(who: str, path: Path, expected: int) -> None:
    try:
        length = path.stat().st_size
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{who}: the shard {path} does not exist; {REPAIR}") from error
    if length != expected:
        raise ValueError(
            f"{who}: the shard {path} must have {expected} B, got {length}; it is truncated or "
            f"damaged: {REPAIR}"
        )


def compare_shard(who: str, path: Path, shard: ShardFile) -> Iterator[None]:
    """Compare a shard with its checksum; yield after each part of the file.

    Raises
    ------
    ValueError
        If it has changed.
    OSError
        If it cannot be read.
    """
    digest = hashlib.sha256()
    with open_file(who, path) as file:
        while part := file.read(PART_BYTES):
            digest.update(part)
            yield
    if digest.hexdigest() != shard.sha256:
        raise ValueError(
            f"{who}: the shard {path} does not match its checksum in {INDEX}; {REPAIR}"
        )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(content).encode()).hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


Array = NDArray[Any]

TEST = "test"

MAX_OPEN_FILES = 64
"""Files of a data set that are open at once, at most, unless more threads read."""


def load_shards(
    *,
    data_dir: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    window: int = 16,
    check: bool = True,
    exif_rotation: bool = True,
    keep: str = KEEP,
) -> tuple[Dataset, Dataset]:
    """Use the shards in `data_dir` that ``python -m pydtnn data pack`` has written.

    The order of an epoch depends on (seed, epoch) only: shards are shuffled, and then the samples
    within each `window` of successive shards. With at most `window` shards it is that of
    `load_folder` for the same images.

    Parameters
    ----------
    data_dir : path, optional
        See `pydtnn.data.load_dataset`.
    image_size, channels, mean, std, exif_rotation, keep
        See `pydtnn.data.load_folder`. With `image_size`, `mean` and `std`, no image is decoded
        before training.
    window : int, default 16
        The radius of the shuffle, in shards.
    check : bool, default True
        Whether each shard is compared with its checksum before it is read for the first time, which
        reads all of it: training begins with that, each rank with its share of the shards. False
        compares only lengths; damaged pixels that can be decoded are then not found.

    Raises
    ------
    FileNotFoundError
        If the index or a shard is missing.
    ValueError
        If the index has changed or has labels of other classes, or a shard has another length than
        in it, is not in the folder, or is a link out of it.
    ImportError
        If Pillow is not installed.
    """
    decode = Decoder("shards", image_size, channels, exif_rotation)
    statistics = user_statistics("shards", mean, std, channels)
    check_int("shards", "window", window, at_least=1)
    root = data_folder(data_dir)
    train, test = (read_index("shards", root / part) for part in (TRAIN, TEST))
    if test.class_names != train.class_names:
        raise ValueError(
            f"shards: {root / TEST / INDEX} must have the classes of {root / TRAIN / INDEX}, got "
            f"{', '.join(test.class_names)!r:.200}; pack both again with python -m pydtnn data pack"
        )
    check = check_bool("shards", "check", check)
    options: dict[str, Any] = {"window": window, "check": check, "keep": keep}
    own = ShardedImages(decode, root / TRAIN, train, like=None, statistics=statistics, **options)
    return own, ShardedImages(decode, root / TEST, test, like=own, statistics=None, **options)


class ShardedImages(EncodedImages):
    """Images in shards, of which a sample is read by one call.

    Parameters
    ----------
    decode : Decoder
    folder : Path
    index : Index
    window : int
        The radius of the shuffle, in shards.
    check : bool
        Whether shards are compared with their checksums before they are read.
    like, statistics, keep
        See `EncodedImages`.
    """

    def __init__(
        self,
        decode: Decoder,
        folder: Path,
        index: Index,
        *,
        window: int,
        check: bool,
        **options: Any,
    ) -> None:
        self.paths = [folder / shard.name for shard in index.shards]
        self.window, self.verified = window, not check
        self._shards, self._checked = index.shards, np.zeros(len(index.shards), bool)
        self._checking = threading.Lock()
        counts = [len(shard.numbers) for shard in index.shards]
        order = _joined(shard.numbers for shard in index.shards)
        by_number = np.argsort(order)
        self.shard = np.repeat(np.arange(len(counts)), counts)[by_number]
        self.offset = _joined(shard.offsets for shard in index.shards)[by_number]
        self.nbytes = _joined(shard.sizes for shard in index.shards)[by_number]
        self._place = by_number  # of each sample, counted over all shards
        self._open = lru_cache(MAX_OPEN_FILES)(lambda shard: OpenFile(self.name, self.paths[shard]))
        labels = _joined(shard.labels for shard in index.shards)[by_number]
        super().__init__(decode, labels, index.class_names, check=False, **options)

    def encoded(self, index: int) -> bytes:
        shard, size = int(self.shard[index]), int(self.nbytes[index])
        if not self.verified:
            with self._checking:
                for _ in self._compare([] if self._checked[shard] else [shard]):
                    pass
        file = self._open(shard)  # closed when no thread refers to it
        data = os.pread(file.descriptor, size, int(self.offset[index]))
        if len(data) != size:
            raise ValueError(f"{self.name}: {self.paths[shard]} has become shorter; {REPAIR}")
        return data

    def verify(self, rank: int, size: int) -> Iterator[None]:
        return self._compare(range(rank, len(self.paths), size))

    def _compare(self, shards: Iterable[int]) -> Iterator[None]:
        for shard in shards:
            yield from compare_shard(self.name, self.paths[shard], self._shards[shard])
            self._checked[shard] = True

    def place(self, index: int) -> str:
        return f"{index:09d} of {self.paths[int(self.shard[index])]}"

    def position(self, indices: Array) -> Array:
        return self._place[indices]

    def shuffled(self, seed: int, epoch: int) -> NDArray[np.int64]:
        return window_permutation(seed, epoch, self.shard, self.window)


class OpenFile:
    """A file that is open for reading until there is no reference to it.

    Attributes
    ----------
    descriptor : int
    """

    def __init__(self, who: str, path: Path) -> None:
        with open_file(who, path) as file:
            self.descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        if "descriptor" in vars(self):
            os.close(self.descriptor)


def _joined(columns: Any) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(column, np.int64) for column in columns])


def window_permutation(
    seed: int, epoch: int, shards: NDArray[np.int64], window: int
) -> NDArray[np.int64]:
    """Shuffle shards, and then the samples within each window of `window` successive shards.

    A sample and the next one come from the same `window` shards, so that data that do not fit in
    memory are read from a few files at a time. If all shards are in one window, the result is that
    of `permutation`.

    Parameters
    ----------
    seed, epoch : int
    shards : ndarray of int64, shape ``(n,)``
        The shard of each sample, from 0.
    window : int
        At least 1.
    """
    count = int(shards.max(initial=-1)) + 1
    places = np.argsort(permutation(seed, epoch, count, "shards"))
    return np.lexsort((order_keys(seed, epoch, len(shards), "order"), places[shards] // window))
