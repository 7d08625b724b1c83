"""Atomic writes: files are written under a temporary name and renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Collection
from pathlib import Path

_NUMBER = re.compile(r"[0-9a-f]{32}")  # of a file that is not complete yet

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def user_cache() -> Path:
    """Return pydtnn's folder in the user's cache; RuntimeError if there is no home directory."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "pydtnn"


def write_file(who: str, path: str | Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content, also after a crash.

    Parameters
    ----------
    who : str
        First word of error messages.
    path : str or Path
        File to write; its folder is created if necessary.
    data : bytes
        Content of the file.

    Raises
    ------
    OSError
        If the file cannot be written; an existing file is unchanged.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.urandom(16).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_through(temporary, data)
        temporary.replace(path)
        flush_directory(path.parent)
    except OSError as error:
        raise unwritable(who, path, error) from error
    finally:
        with contextlib.suppress(OSError):  # usually because it was renamed
            temporary.unlink()


def remove_unfinished(directory: Path, names: Collection[str]) -> None:
    """Remove temporary files of these names that a process killed in `write_file` has left."""
    for path in directory.iterdir():
        name, _, number = path.name.removeprefix(".").rpartition(".")
        if path.name == f".{name}.{number}" and name in names and _NUMBER.fullmatch(number):
            path.unlink(missing_ok=True)


def write_through(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_directory(path: Path) -> None:
    """Flush a folder to disk, so that a rename survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems do not support fsync of folders; they persist names themselves.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(who: str, path: str | Path) -> bytes:
    """Return the content of a file.

    Raises
    ------
    OSError
        If the file does not exist or cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{who}: file {path} does not exist") from error
    except OSError as error:
        raise type(error)(f"{who}: cannot read {path}: {_reason(error)}") from error


def unwritable(who: str, path: str | Path, error: OSError) -> OSError:
    """Return an error of the same type with a message for a file that could not be written."""
    advice = "free some space or choose another folder"
    if error.errno not in _FULL:
        advice = "choose another folder"
    return type(error)(f"{who}: cannot write {path}: {_reason(error)}; {advice}")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
