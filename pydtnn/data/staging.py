"""Copies of shards on the disk of a host."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pydtnn.data.folder import TRAIN
from pydtnn.data.locate import data_folder
from pydtnn.data.shard_index import INDEX, REPAIR, ShardFile, compare_shard, read_index
from pydtnn.data.shards import TEST
from pydtnn.utils.files import path_inside, read_file, write_file

Folder = str | os.PathLike[str]


def staged_folder(data_dir: Folder | None, stage: Folder) -> Path:
    """Return the folder below `stage` of a copy of shards, which is named after their checksums.

    Raises
    ------
    OSError
        If an index cannot be read.
    """
    digest = hashlib.sha256()
    for part in (TRAIN, TEST):
        digest.update(read_file("stage", data_folder(data_dir) / part / INDEX))
    return Path(stage).expanduser() / f"shards-{digest.hexdigest()[:16]}"


def stage_shards(data_dir: Folder | None, stage: Folder, *, check: bool = True) -> Path:
    """Copy shards to a folder of this host, unless they are there already; return their folder.

    A shard is compared with its checksum when it is copied, and gets its name when all of it is on
    the disk. An interrupted copy is continued after the last complete shard. Several processes may
    copy at the same time. Nothing is written outside of `stage`.

    Parameters
    ----------
    data_dir : path or None
        See `pydtnn.data.load_dataset`.
    stage : path
    check : bool, default True
        Whether earlier copies are compared with their checksums, and replaced if they differ. False
        compares only their lengths.

    Raises
    ------
    FileNotFoundError, ValueError
        If a shard or an index is missing or has changed, or a link leads out of the folder.
    OSError
        If a file cannot be written.
    """
    target = staged_folder(data_dir, stage)
    path_inside("stage", target.parent, target.name)
    for part in (TRAIN, TEST):
        source, copy = data_folder(data_dir) / part, path_inside("stage", target, part)
        for shard in read_index("stage", source).shards:
            _copy(source / shard.name, path_inside("stage", copy, shard.name), shard, check)
        write_file("stage", copy / INDEX, read_file("stage", source / INDEX))
    return target


def _copy(source: Path, target: Path, shard: ShardFile, check: bool) -> None:
    if target.is_file() and target.stat().st_size == shard.nbytes:
        try:
            for _ in compare_shard("stage", target, shard) if check else ():
                pass
            return
        except (OSError, ValueError):  # it was damaged, and is copied again
            pass
    data = read_file("stage", source)
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise ValueError(f"stage: {source} does not match its checksum in {INDEX}; {REPAIR}")
    write_file("stage", target, data)
