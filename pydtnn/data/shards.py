"""Images in shards: tar files that each rank reads in parts, by the offsets in their index."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
from pydtnn.data.shard_index import REPAIR, Index, read_index
from pydtnn.utils.validate import whole

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

    Raises
    ------
    FileNotFoundError
        If the index or a shard is missing.
    ValueError
        If the index has changed, or a shard has another length than in it.
    ImportError
        If Pillow is not installed.
    """
    decode = Decoder("shards", image_size, channels)
    statistics = given_statistics("shards", mean, std, channels)
    whole("shards", "window", window, at_least=1)
    root = data_folder(data_dir)
    train, test = (read_index("shards", root / part) for part in (TRAIN, TEST))
    own = ShardedImages(decode, root / TRAIN, train, window, like=None, statistics=statistics)
    return own, ShardedImages(decode, root / TEST, test, window, like=own, statistics=None)


class ShardedImages(EncodedImages):
    """Images in shards, of which a sample is read by one call.

    Parameters
    ----------
    decode : Decoder
    folder : Path
    index : Index
    window : int
        The radius of the shuffle, in shards.
    like, statistics
        See `EncodedImages`.
    """

    def __init__(
        self,
        decode: Decoder,
        folder: Path,
        index: Index,
        window: int,
        *,
        like: EncodedImages | None,
        statistics: Any,
    ) -> None:
        self.paths = [folder / shard.name for shard in index.shards]
        self.window = window
        counts = [len(shard.numbers) for shard in index.shards]
        order = _joined(shard.numbers for shard in index.shards)
        by_number = np.argsort(order)
        self.shard = np.repeat(np.arange(len(counts)), counts)[by_number]
        self.offset = _joined(shard.offsets for shard in index.shards)[by_number]
        self.nbytes = _joined(shard.sizes for shard in index.shards)[by_number]
        self._place = by_number  # of each sample, counted over all shards
        self._open = lru_cache(OPEN_FILES)(lambda shard: OpenFile(self.paths[shard]))
        labels = _joined(shard.labels for shard in index.shards)[by_number]
        super().__init__(
            decode, labels, index.class_names, like=like, statistics=statistics, check=False
        )

    def encoded(self, index: int) -> bytes:
        shard, size = int(self.shard[index]), int(self.nbytes[index])
        file = self._open(shard)  # closed when no thread refers to it
        data = os.pread(file.descriptor, size, int(self.offset[index]))
        if len(data) != size:
            raise ValueError(f"{self.name}: {self.paths[shard]} has become shorter; {REPAIR}")
        return data

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

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if "descriptor" in vars(self):
            os.close(self.descriptor)


def _joined(columns: Any) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(column, np.int64) for column in columns])
