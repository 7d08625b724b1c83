"""Checkpoints as folders: written whole, checked when read, the last few kept.

A checkpoint is a folder ``checkpoint-<step>`` with

- ``arrays.safetensors``: every array,
- ``state.json``: every number, and the configuration,
- ``SHA256SUMS``: their checksums, for ``sha256sum --check`` too.

It is written under another name, brought to the disk and renamed once, and to be removed it is
renamed first, so a folder of this name is complete. Whatever ends the process, and wherever, a
checkpoint that was complete is found again until a later one is in its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydtnn.utils.files import flush_directory, unwritable, write_through

ARRAYS, STATE, SUMS = "arrays.safetensors", "state.json", "SHA256SUMS"

_NAME = re.compile(r"checkpoint-\d{8,}")
_ASIDE = re.compile(r"\.checkpoint-\d{8,}\.replaced")
_PARTIAL = re.compile(r"\.checkpoint-\d{8,}\.partial")


def find_checkpoints(directory: str | Path) -> list[Path]:
    """List the checkpoints in a folder, newest last; none where there is no folder.

    One that was moved aside for its replacement, which then never came, is among them.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = {step_of(path): path for path in _matching(directory, _ASIDE)}
    found |= {step_of(path): path for path in _matching(directory, _NAME)}
    return [found[step] for step in sorted(found)]


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's name tells."""
    return int(path.name.removesuffix(".replaced").rpartition("-")[2])


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
    partial, aside = (directory / f".{path.name}.{end}" for end in ("partial", "replaced"))
    sums = "".join(f"{_digest(data)}  {name}\n" for name, data in files.items())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tidy(directory)
        partial.mkdir()
        for name, data in {**files, SUMS: sums.encode()}.items():
            write_through(partial / name, data)
        flush_directory(partial)
        if path.exists():
            path.rename(aside)  # a folder cannot be renamed onto one that is not empty
        partial.rename(path)
        flush_directory(directory)
    except OSError as error:
        raise unwritable("checkpoint", path, error) from error
    finally:
        with contextlib.suppress(OSError):  # what is aside is found there, too
            tidy(directory)
    present = find_checkpoints(directory)
    older = [other for other in present if step_of(other) < step_of(path)]
    later = [other for other in present if step_of(other) > step_of(path)]
    for other in (*older[: max(len(older) + 1 - keep, 0)], *later):
        _remove(other)


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


def tidy(directory: Path) -> None:
    """Remove what a process that was killed may have left, and put back what it had moved aside.

    No other process may be writing there.
    """
    for path in _matching(directory, _PARTIAL):
        shutil.rmtree(path, ignore_errors=True)
    for path in _matching(directory, _ASIDE):
        place = checkpoint_path(directory, step_of(path))
        if place.exists():
            _remove(path)
        else:
            path.rename(place)


def _remove(path: Path) -> None:
    """Remove a checkpoint; where that is interrupted, what is left does not look like one."""
    partial = path.with_name(f".{checkpoint_path(path.parent, step_of(path)).name}.partial")
    with contextlib.suppress(OSError):  # then it stays, whole
        path.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


def _matching(directory: Path, name: re.Pattern[str]) -> list[Path]:
    return [path for path in directory.iterdir() if name.fullmatch(path.name)]
