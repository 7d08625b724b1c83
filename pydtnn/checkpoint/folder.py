"""Checkpoints as folders: written whole, checked when read, the last few kept.

A checkpoint is a folder ``checkpoint-<step>`` with

- ``arrays.safetensors``: every array,
- ``state.json``: every number, and the configuration,
- ``SHA256SUMS``: their checksums, for ``sha256sum --check`` too.

It is written under another name, brought to the disk and renamed once, so a folder of this name
is complete.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydtnn.files import flush_directory, unwritable, write_through

ARRAYS, STATE, SUMS = "arrays.safetensors", "state.json", "SHA256SUMS"

_NAME = re.compile(r"checkpoint-(\d{8,})")
_UNFINISHED = re.compile(r"\.checkpoint-\d{8,}\.(partial|replaced)")


def find_checkpoints(directory: str | Path) -> list[Path]:
    """List the checkpoints in a folder, newest last; none where there is no folder."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if _NAME.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's name tells."""
    return int(path.name.rpartition("-")[2])


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """Return where the checkpoint after so many steps lies."""
    return Path(directory) / f"checkpoint-{step:08d}"


def write_checkpoint(path: Path, files: Mapping[str, bytes], keep: int) -> None:
    """Write a checkpoint, then remove what is no longer wanted.

    Parameters
    ----------
    path : Path
        As `checkpoint_path` returns it. Its folder is made if need be; a checkpoint there is
        replaced.
    files : mapping of str to bytes
        Contents of `ARRAYS` and `STATE`.
    keep : int
        How many to keep, this one included. Those of later steps go too: they are damaged, or
        belong to a course of training that was given up.

    Raises
    ------
    OSError
        If it cannot be written. Nothing of it is left then, and the earlier checkpoints stay.
    """
    directory = path.parent
    partial, replaced = (directory / f".{path.name}.{end}" for end in ("partial", "replaced"))
    sums = "".join(f"{_digest(data)}  {name}\n" for name, data in files.items())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(directory)
        partial.mkdir()
        for name, data in {**files, SUMS: sums.encode()}.items():
            write_through(partial / name, data)
        flush_directory(partial)
        if path.exists():
            path.rename(replaced)  # a folder cannot be renamed onto one that is not empty
        partial.rename(path)
        flush_directory(directory)
    except OSError as error:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        raise unwritable("checkpoint", path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _remove_unfinished(directory)
    present = find_checkpoints(directory)
    last = present.index(path) + 1
    for other in (*present[: max(last - keep, 0)], *present[last:]):
        shutil.rmtree(other, ignore_errors=True)


def read_checkpoint(path: Path) -> dict[str, bytes]:
    """Read the files of a checkpoint and compare them with their checksums.

    Raises
    ------
    ValueError
        If a file is missing, cannot be read or has changed.
    """
    text = _read(path, SUMS).decode(errors="replace")
    sums = {
        name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())
    }
    files = {name: _read(path, name) for name in (ARRAYS, STATE)}
    for name, data in files.items():
        if sums.get(name) != _digest(data):
            raise ValueError(f"{name} does not match its checksum")
    return files


def _read(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{name} cannot be read ({reason})") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _remove_unfinished(directory: Path) -> None:
    """Remove what a process that was killed may have left."""
    for path in directory.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
