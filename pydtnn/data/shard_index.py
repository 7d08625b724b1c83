"""The index of a folder of shards: tar files of images, in the layout of WebDataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydtnn.utils.files import read_file, write_file
from pydtnn.utils.json_object import parse_object

INDEX, VERSION = "index.json", 1

REPAIR = "copy it again, or pack the images again with python -m pydtnn.data pack"


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
        If the index has changed, or a shard has another length.
    """
    path = folder / INDEX
    try:
        content = parse_object(read_file(who, path), "it", VERSION)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{who}: {path} does not exist; specify a folder that python -m pydtnn.data pack has "
            "completed"
        ) from error
    except ValueError as error:
        raise ValueError(f"{who}: {path} cannot be used: {error}; {REPAIR}") from error
    if content.pop("sha256", None) != _digest(content):
        raise ValueError(f"{who}: {path} does not match the checksum in it; {REPAIR}")
    index = Index(
        tuple(content["class_names"]), tuple(ShardFile(**shard) for shard in content["shards"])
    )
    for shard in index.shards:
        _check_length(who, folder / shard.name, shard.nbytes)
    return index


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


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(content).encode()).hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))
