"""Packing of images into shards, and the check of shards.

A shard is a tar file in the layout of WebDataset (Aizman et al., "High performance I/O for large
scale deep learning", 2019): for each image ``NUMBER.jpg``, ``NUMBER.png`` or
``NUMBER.webp``, unchanged, and ``NUMBER.cls``, its class as a decimal number. Its bytes depend on
the images only.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.folder import TRAIN, ImageFiles, find_images
from pydtnn.data.images import Decoder
from pydtnn.data.order import permutation
from pydtnn.tools.shards.reading import (
    INDEX,
    TEST,
    Index,
    ShardFile,
    compare_shard,
    read_index,
    write_index,
)
from pydtnn.utils.files import read_file, remove_unfinished, write_file
from pydtnn.utils.validate import check_int

SHARD_BYTES = 256 << 20
BLOCK = tarfile.BLOCKSIZE


class Packed(NamedTuple):
    """What `pack_shards` has written for the training or the test set.

    Attributes
    ----------
    folder : Path
    samples, shards : int
    nbytes : int
        Length of all shards, in B.
    """

    folder: Path
    samples: int
    shards: int
    nbytes: int


def pack_shards(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    shard_bytes: int = SHARD_BYTES,
    test_fraction: float | None = None,
    skip_bad: bool = False,
    threads: int = 1,
) -> tuple[Packed, Packed]:
    """Pack the images of a folder into shards, below ``output/train`` and ``output/test``.

    Training images are shuffled first, so that each shard has images of all classes. Every image is
    decoded, to check it.

    Parameters
    ----------
    folder : path
        See `pydtnn.data.load_folder`.
    output : path
    shard_bytes : int, default 256 MiB
        Largest sum of the lengths of images in a shard, unless a single image is longer.
    test_fraction, skip_bad
        See `pydtnn.data.load_folder`.
    threads : int, default 1
        Threads that read and decode images.

    Returns
    -------
    (Packed, Packed)

    Raises
    ------
    FileNotFoundError, ValueError
        As `load_folder`, or if an image is damaged.
    OSError
        If a file cannot be read or written.
    """
    check_int("pack", "shard_bytes", shard_bytes, at_least=1)
    check_int("pack", "threads", threads, at_least=1)
    skip = Decoder("pack") if skip_bad else None
    train, test = find_images("pack", Path(folder), test_fraction, 0, skip)
    with ThreadPoolExecutor(threads) as pool:
        shuffled = permutation(0, 0, len(train.paths), "pack")
        return (
            _write(train, shuffled, Path(output) / TRAIN, shard_bytes, pool),
            _write(test, np.arange(len(test.paths)), Path(output) / TEST, shard_bytes, pool),
        )


def verify_shards(output: str | os.PathLike[str]) -> tuple[int, int]:
    """Compare all shards with their checksums; return the number of images and of shards.

    Raises
    ------
    FileNotFoundError, ValueError
        If a file is missing or has changed.
    """
    samples = shards = 0
    for folder in (Path(output) / TRAIN, Path(output) / TEST):
        index = read_index("verify", folder)
        for shard in index.shards:
            for _ in compare_shard("verify", folder / shard.name, shard):
                pass
        samples, shards = samples + index.samples, shards + len(index.shards)
    return samples, shards


def _write(
    images: ImageFiles,
    order: NDArray[np.int64],
    output: Path,
    shard_bytes: int,
    pool: ThreadPoolExecutor,
) -> Packed:
    """Write the shards of a training or test set, and then the index."""
    output.mkdir(parents=True, exist_ok=True)
    shards: list[ShardFile] = []
    for numbers in _cut(images, order.tolist(), shard_bytes, pool):
        shard, data = _encode(images, numbers, f"shard-{len(shards):06d}.tar", pool)
        (output / INDEX).unlink(missing_ok=True)  # a damaged image in the first changes nothing
        remove_unfinished(output, [shard.name, INDEX])
        write_file("pack", output / shard.name, data)
        shards.append(shard)
    write_index("pack", output, Index(images.class_names, tuple(shards)))
    return Packed(output, len(order), len(shards), sum(shard.nbytes for shard in shards))


def _cut(
    images: ImageFiles, order: list[int], shard_bytes: int, pool: ThreadPoolExecutor
) -> Iterator[list[int]]:
    """Cut the numbers of the images, in their order, into those of shards."""
    sizes = [status.st_size for status in pool.map(os.stat, images.paths)]
    start = length = 0
    for stop, number in enumerate(order):
        if length and length + sizes[number] > shard_bytes:
            yield order[start:stop]
            start, length = stop, 0
        length += sizes[number]
    yield order[start:]


def _encode(
    images: ImageFiles, numbers: list[int], name: str, pool: ThreadPoolExecutor
) -> tuple[ShardFile, bytes]:
    """Return a shard's entry in the index, and its bytes; all images are decoded."""
    decode = Decoder("pack")

    def load(path: str) -> bytes:
        data = read_file("pack", path)
        decode(data, path)
        return data

    paths, labels = [images.paths[i] for i in numbers], images.labels[numbers].tolist()
    parts: list[bytes] = []
    offsets, sizes, end = [], [], 0
    for path, number, label, data in zip(
        paths, numbers, labels, pool.map(load, paths), strict=True
    ):
        suffix = Path(path).suffix.lower().replace("jpeg", "jpg")
        parts.append(_member(f"{number:09d}{suffix}", data))
        parts.append(_member(f"{number:09d}.cls", str(label).encode()))
        offsets.append(end + BLOCK)
        sizes.append(len(data))
        end += len(parts[-2]) + len(parts[-1])
    shard = b"".join([*parts, bytes(2 * BLOCK)])
    digest = hashlib.sha256(shard).hexdigest()
    return ShardFile(name, len(shard), digest, numbers, labels, offsets, sizes), shard


def _member(name: str, data: bytes) -> bytes:
    """Return a file in a tar archive, without times and owners."""
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    return entry.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)
