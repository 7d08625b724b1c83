"""Checkpoints as folders: written atomically, verified when read, with a limited number kept.

A checkpoint is a folder ``checkpoint-<step>`` with

- ``arrays.safetensors``: every array,
- ``state.json``: every number, and the configuration,
- ``SHA256SUMS``: their checksums, for ``sha256sum --check`` too.

It is written under another name, flushed to the disk and renamed once, and it is renamed before it
is removed, so a folder of this name is complete. After any termination of the process, a complete
checkpoint is therefore available until a later one replaces it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydtnn.utils.files import fill_folder, flush_directory, read_folder, unwritable

ARRAYS, STATE = "arrays.safetensors", "state.json"

_NAME = re.compile(r"checkpoint-\d{8,}")

_ASIDE = re.compile(r"\.checkpoint-\d{8,}\.replaced")

_PARTIAL = re.compile(r"\.checkpoint-\d{8,}\.partial")


def find_checkpoints(directory: str | Path) -> list[Path]:
    """List the checkpoints in a folder, newest last; none if there is no folder.

    This includes a checkpoint that was renamed for a replacement that was not completed.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = {step_of(path): path for path in _matching(directory, _ASIDE)}
    found |= {step_of(path): path for path in _matching(directory, _NAME)}
    return [found[step] for step in sorted(found)]


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removesuffix(".replaced").rpartition("-")[2])


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """Return the path of the checkpoint after a number of steps."""
    return Path(directory) / f"checkpoint-{step:08d}"


def write_checkpoint(path: Path, files: Mapping[str, bytes], keep: int) -> None:
    """Write a checkpoint, then remove older ones.

    Parameters
    ----------
    path : Path
        As returned by `checkpoint_path`. Its folder is created if necessary; an existing checkpoint
        is replaced.
    files : mapping of str to bytes
        Contents of `ARRAYS` and `STATE`.
    keep : int
        Number of checkpoints to keep, including this one. Those of later steps are removed too:
        they are damaged, or belong to a run that was abandoned.

    Raises
    ------
    OSError
        If it cannot be written. No incomplete files remain, and earlier checkpoints are kept.
    """
    directory = path.parent
    partial, aside = (directory / f".{path.name}.{end}" for end in ("partial", "replaced"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tidy(directory)
        fill_folder(partial, files)
        if path.exists():
            path.rename(aside)  # a folder cannot be renamed onto one that is not empty
        partial.rename(path)
        flush_directory(directory)
    except OSError as error:
        raise unwritable("checkpoint", path, error) from error
    finally:
        with contextlib.suppress(OSError):  # the renamed one is found as well
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
    return read_folder(path, (ARRAYS, STATE))


def tidy(directory: Path) -> None:
    """Remove incomplete files of a killed process, and restore checkpoints that it had renamed.

    No other process may be writing in the folder.
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
    """Remove a checkpoint; after an interruption the rest does not have the name of one."""
    partial = path.with_name(f".{checkpoint_path(path.parent, step_of(path)).name}.partial")
    with contextlib.suppress(OSError):  # then it remains, complete
        path.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


def _matching(directory: Path, name: re.Pattern[str]) -> list[Path]:
    return [path for path in directory.iterdir() if name.fullmatch(path.name)]
