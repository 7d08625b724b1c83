"""Files that are whole or absent: written beside their place and renamed into it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Collection
from pathlib import Path

_NUMBER = re.compile(r"[0-9a-f]{32}")  # of a file that is not complete yet

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def user_cache() -> Path:
    """Return pydtnn's folder in the user's cache; RuntimeError where the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "pydtnn"


def write_file(who: str, path: str | Path, data: bytes) -> None:
    """Replace a file at once: readers see the old content or the new one, also after a crash.

    Parameters
    ----------
    who : str
        Begins the sentence of an error.
    path : str or Path
        Its folder is made if need be.
    data : bytes
        The whole content.

    Raises
    ------
    OSError
        In one sentence, if the file cannot be written; what was there before is left as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_through(temporary, data)
        temporary.replace(path)
        flush_directory(path.parent)
    except OSError as error:
        raise unwritable(who, path, error) from error
    finally:
        with contextlib.suppress(OSError):  # mostly because it has its name by now
            temporary.unlink()


def remove_unfinished(directory: Path, names: Collection[str]) -> None:
    """Remove what a process that was killed in `write_file` has left of files with these names."""
    for path in directory.iterdir():
        name, _, number = path.name.removeprefix(".").rpartition(".")
        if path.name == f".{name}.{number}" and name in names and _NUMBER.fullmatch(number):
            path.unlink(missing_ok=True)


def write_through(path: Path, data: bytes) -> None:
    """Write a new file and return when it is on the disk, not merely in the system's memory."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flush_directory(path: Path) -> None:
    """Bring the names in a folder to the disk, so that a rename outlives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems cannot do this for folders; they keep names safe by themselves.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(who: str, path: str | Path) -> bytes:
    """Read a file.

    Raises
    ------
    OSError
        In one sentence, if there is none or it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{who}: there is no file {path}") from error
    except OSError as error:
        raise type(error)(f"{who}: cannot read {path}: {_reason(error)}") from error


def unwritable(who: str, path: str | Path, error: OSError) -> OSError:
    """Make the sentence of a file that could not be written; an error of the same type."""
    advice = "free some space or choose another folder"
    if error.errno not in _FULL:
        advice = "choose another folder"
    return type(error)(f"{who}: cannot write {path}: {_reason(error)}; {advice}")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
