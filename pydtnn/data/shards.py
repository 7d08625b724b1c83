"""Images in shards: tar files that each rank reads in parts, by the offsets in their index."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.dataset import Dataset
from pydtnn.data.decode import Decoder
from pydtnn.data.folder import TRAIN
from pydtnn.data.images import EncodedImages, given_statistics
from pydtnn.data.locate import data_folder
from pydtnn.data.order import window_permutation
from pydtnn.data.shard_index import INDEX, REPAIR, Index, compare_shard, read_index
from pydtnn.utils.files import open_file
from pydtnn.utils.validate import truth, whole

Array = NDArray[Any]

TEST = "test"

OPEN_FILES = 64
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
) -> tuple[Dataset, Dataset]:
    """Use the shards in `data_dir` that ``python -m pydtnn.data pack`` has written.

    The order of an epoch depends on (seed, epoch) only: shards are shuffled, and then the samples
    within each `window` of successive shards. With at most `window` shards it is that of
    `load_folder` for the same images.

    Parameters
    ----------
    data_dir : path, optional
        See `pydtnn.data.load_dataset`.
    image_size, channels, mean, std
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
    decode = Decoder("shards", image_size, channels)
    statistics = given_statistics("shards", mean, std, channels)
    whole("shards", "window", window, at_least=1)
    root = data_folder(data_dir)
    train, test = (read_index("shards", root / part) for part in (TRAIN, TEST))
    if test.class_names != train.class_names:
        raise ValueError(
            f"shards: {root / TEST / INDEX} must have the classes of {root / TRAIN / INDEX}, got "
            f"{', '.join(test.class_names)!r:.200}; pack both again with python -m pydtnn.data pack"
        )
    options: dict[str, Any] = {"window": window, "check": truth("shards", "check", check)}
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
    like, statistics
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
        like: EncodedImages | None,
        statistics: Any,
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
        self._open = lru_cache(OPEN_FILES)(lambda shard: OpenFile(self.name, self.paths[shard]))
        labels = _joined(shard.labels for shard in index.shards)[by_number]
        super().__init__(
            decode, labels, index.class_names, like=like, statistics=statistics, check=False
        )

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
