"""Packing of images into shards, and the check of shards.

A shard is a tar file in the layout of WebDataset (Aizman et al., "High performance I/O for large
scale deep learning", 2019): for each image ``NUMBER.jpg``, ``NUMBER.png`` or
``NUMBER.webp``, unchanged, and ``NUMBER.cls``, its class as a decimal number. Its bytes depend on
the images only.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.folder import TRAIN, ImageFiles, find_images
from pydtnn.data.images import Decoder
from pydtnn.data.order import permutation
from pydtnn.data.shards import INDEX, TEST, Index, ShardFile, compare_shard, read_index, write_index
from pydtnn.utils.files import MAX_TEXT_B, read_file, remove_unfinished, write_file
from pydtnn.utils.validate import check_int

PROGRESS = ".progress.json"
"""The shards of a folder that are complete, for the next run."""

SHARD_BYTES = 256 << 20
BLOCK = tarfile.BLOCKSIZE


class Packed(NamedTuple):
    """What `pack_shards` has written for the training or the test set.

    Attributes
    ----------
    folder : Path
    samples, shards : int
    kept : int
        Shards that were complete already.
    nbytes : int
        Length of all shards, in B.
    """

    folder: Path
    samples: int
    shards: int
    kept: int
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
    decoded, to check it. After an interruption, the next call continues after the last complete
    shard; shards whose images have changed are written again.

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
        writer = _Writer(shard_bytes, pool)
        shuffled = permutation(0, 0, len(train.paths), "pack")
        return (
            writer.write(train, shuffled, Path(output) / TRAIN),
            writer.write(test, np.arange(len(test.paths)), Path(output) / TEST),
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


@dataclass(frozen=True)
class _ShardPlan:
    """The images of a shard, before they are read."""

    name: str
    paths: Sequence[str]
    numbers: Sequence[int]
    labels: Sequence[int]
    sizes: Sequence[int]
    times: Sequence[int]  # of the last change of each file, in ns

    @property
    def digest(self) -> str:
        """Checksum of all that identifies the images."""
        text = json.dumps([self.paths, self.numbers, self.labels, self.sizes, self.times])
        return hashlib.sha256(text.encode()).hexdigest()

    def layout(self) -> tuple[list[int], int]:
        """Return the offset of each image, and the length of the shard."""
        offsets, end = [], 0
        for size, label in zip(self.sizes, self.labels, strict=True):
            offsets.append(end + BLOCK)
            end += 2 * BLOCK + _padded(size) + _padded(len(str(label)))
        return offsets, end + 2 * BLOCK

    def shard(self, sha256: str) -> ShardFile:
        """Return the shard's entry in the index."""
        offsets, nbytes = self.layout()
        return ShardFile(self.name, nbytes, sha256, self.numbers, self.labels, offsets, self.sizes)


@dataclass(frozen=True)
class _Writer:
    """Write the shards of a training or test set."""

    shard_bytes: int
    pool: ThreadPoolExecutor

    def write(self, images: ImageFiles, order: NDArray[np.int64], output: Path) -> Packed:
        """Write the shards that are not complete, and then the index."""
        plans = list(self._plans(images, order))
        output.mkdir(parents=True, exist_ok=True)
        remove_unfinished(output, [INDEX, PROGRESS, *(plan.name for plan in plans)])
        progress, kept, shards = _read_progress(output), 0, []
        for plan in plans:
            shard = self._complete(plan, progress.get(plan.name), output)
            if shard is None:
                data = self._encode(plan)
                shard = plan.shard(hashlib.sha256(data).hexdigest())
                (output / INDEX).unlink(missing_ok=True)  # a damaged image changes nothing
                write_file("pack", output / plan.name, data)
                progress[plan.name] = [plan.digest, shard.sha256]
                write_file("pack", output / PROGRESS, json.dumps(progress).encode())
            else:
                kept += 1
            shards.append(shard)
        write_index("pack", output, Index(images.class_names, tuple(shards)))
        nbytes = sum(shard.nbytes for shard in shards)
        return Packed(output, len(images.paths), len(shards), kept, nbytes)

    def _plans(self, images: ImageFiles, order: NDArray[np.int64]) -> Iterator[_ShardPlan]:
        """Cut the images, in their order, into shards."""
        facts = list(self.pool.map(os.stat, images.paths))
        start = count = length = 0
        for stop, number in enumerate(order):
            size = facts[number].st_size
            if length and length + size > self.shard_bytes:
                yield _plan(images, facts, order[start:stop], count)
                start, count, length = stop, count + 1, 0
            length += size
        yield _plan(images, facts, order[start:], count)

    def _complete(self, plan: _ShardPlan, known: Any, output: Path) -> ShardFile | None:
        """Return the entry of a shard that an earlier run has written from the same images."""
        path = output / plan.name
        if not known or known[0] != plan.digest or not path.is_file():
            return None
        shard = plan.shard(known[1])
        return shard if path.stat().st_size == shard.nbytes else None

    def _encode(self, plan: _ShardPlan) -> bytes:
        """Return the bytes of a shard; all images are decoded."""
        decode, parts = Decoder("pack"), []

        def load(path: str) -> bytes:
            data = read_file("pack", path)
            decode(data, path)
            return data

        rows = zip(plan.paths, plan.numbers, plan.labels, plan.sizes, strict=True)
        for (path, number, label, size), data in zip(
            rows, self.pool.map(load, plan.paths), strict=True
        ):
            if len(data) != size:
                raise ValueError(f"pack: {path} has changed meanwhile; pack the images again")
            suffix = Path(path).suffix.lower().replace("jpeg", "jpg")
            parts += [_member(f"{number:09d}{suffix}", data)]
            parts += [_member(f"{number:09d}.cls", str(label).encode())]
        return b"".join([*parts, bytes(2 * BLOCK)])


def _plan(
    images: ImageFiles, facts: Sequence[os.stat_result], numbers: NDArray[np.int64], count: int
) -> _ShardPlan:
    chosen = numbers.tolist()
    return _ShardPlan(
        f"shard-{count:06d}.tar",
        [images.paths[i] for i in chosen],
        chosen,
        images.labels[numbers].tolist(),
        [facts[i].st_size for i in chosen],
        [facts[i].st_mtime_ns for i in chosen],
    )


def _read_progress(output: Path) -> dict[str, Any]:
    """Return checksums of the images and the bytes of complete shards, by name."""
    try:
        found = json.loads(read_file("pack", output / PROGRESS, MAX_TEXT_B))
    except (OSError, ValueError):  # none, or damaged: all shards are written again
        return {}
    return found if isinstance(found, dict) else {}


def _member(name: str, data: bytes) -> bytes:
    """Return a file in a tar archive, without times and owners."""
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    return entry.tobuf(tarfile.USTAR_FORMAT) + data + bytes(_padded(len(data)) - len(data))


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
