"""Checkpoints as folders: written atomically, verified when read, with a limited number kept.

A checkpoint is a folder ``checkpoint-<step>`` with

- ``arrays.safetensors``: every array; of a large network several files, see `layout`,
- ``state.json``: every number, and the configuration,
- ``XXH64SUMS``: their checksums, for ``xxhsum --check`` too.

Checksums find every accidental change of files, but they are no protection against people who can
write them: these can write other checksums, whatever their algorithm. So they need not be
cryptographic. SHA-256 took as long as everything else together; older checkpoints have it.

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

from pydtnn.utils.files import (
    SHA256,
    Checksums,
    Digest,
    add_files,
    flush_directory,
    read_sums,
    unwritable,
)

STATE = "state.json"
"""Name of the file with everything but arrays."""


def _xxh64() -> Digest:
    from pydtnn.kernels.cpu._hash import Hash64

    digest: Digest = Hash64()
    return digest


XXH64 = Checksums("XXH64SUMS", _xxh64)

KINDS = (XXH64, SHA256)
"""Checksums that a checkpoint may have; new ones have the first kind."""

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


def begin_checkpoint(path: Path) -> Path:
    """Create the folder in which the files of a checkpoint are written, and return it.

    Raises
    ------
    OSError
        If that is not possible; no incomplete files remain.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tidy(path.parent)
        partial_path(path).mkdir()
    except OSError as error:
        raise unwritable("checkpoint", path, error) from error
    return partial_path(path)


def complete_checkpoint(
    path: Path, files: Mapping[str, bytes], sums: Mapping[str, str], keep: int
) -> None:
    """Write the remaining files of a checkpoint, rename it into place, and remove older ones.

    Parameters
    ----------
    path : Path
        As returned by `checkpoint_path`; `begin_checkpoint` has been called. An existing checkpoint
        is replaced.
    files : mapping of str to bytes
        Contents of the files that are not written yet.
    sums : mapping of str to str
        Checksums of those that are.
    keep : int
        Number of checkpoints that remain. Those of later steps are removed too: they are damaged,
        or belong to a run that was abandoned.

    Raises
    ------
    OSError
        If it cannot be written. No incomplete files remain, and earlier checkpoints are kept.
    """
    directory = path.parent
    partial, aside = partial_path(path), directory / f".{path.name}.replaced"
    try:
        add_files(partial, files, XXH64, sums)
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
    later = [other for other in present if step_of(other) > step_of(path)]
    older = [other for other in present if step_of(other) <= step_of(path)]
    for other in (*older[:-keep], *later):
        _remove(other)


def sums_of(path: Path) -> tuple[Checksums, dict[str, str]]:
    """Return the kind of a checkpoint's checksums, and those of its files by name.

    Raises
    ------
    ValueError
        If there are none that can be read, or of another kind only.
    """
    for kind in KINDS:
        if (path / kind.file).exists():
            return kind, read_sums(path, kind)
    names = " or ".join(kind.file for kind in KINDS)
    other = min((file.name for file in path.glob("*SUMS")), default="none")
    raise ValueError(f"its checksums must be {names} for this version of pydtnn, got {other}")


def partial_path(path: Path) -> Path:
    """Return the path of the folder in which a checkpoint is written."""
    return path.with_name(f".{path.name}.partial")


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
    partial = partial_path(checkpoint_path(path.parent, step_of(path)))
    with contextlib.suppress(OSError):  # then it remains, complete
        path.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


def _matching(directory: Path, name: re.Pattern[str]) -> list[Path]:
    return [path for path in directory.iterdir() if name.fullmatch(path.name)]
