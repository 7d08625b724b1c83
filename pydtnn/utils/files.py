"""Reading and writing of files and folders: reads never block, and writes are atomic.

Checkpoints and saved models are folders of files with checksums, in the format of ``sha256sum`` and
``xxhsum``, with a JSON object that has a format number.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol


class Digest(Protocol):
    """A checksum of bytes that are given in several parts, as in `hashlib`."""

    def update(self, data: Any, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far."""


class Checksums(NamedTuple):
    """How the checksums of a folder are computed, and the name of the file with them."""

    file: str
    new: Callable[[], Digest]

    def of(self, data: bytes) -> str:
        """Return the checksum of bytes."""
        digest = self.new()
        digest.update(data)
        return digest.hexdigest()


SHA256 = Checksums("SHA256SUMS", hashlib.sha256)

_NUMBER = re.compile(r"[0-9a-f]{32}")  # of a file that is not complete yet

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

MAX_RATIO, MIN_LIMIT = 100, 64 << 20
"""A compressed file may expand to this multiple of its length, and to this many bytes at least."""

MAX_TEXT_B = 256 << 20
"""Largest plausible file besides arrays, in B: the index of a million images has 80 MB."""

_MAX_SUMS_B = 1 << 24

_KINDS = {
    stat.S_IFIFO: "named pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}


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


def open_file(
    who: str, path: str | Path, at_most: int | None = None, *, folder: Path | None = None
) -> BinaryIO:
    """Open a regular file for reading, without blocking.

    All files that other people may have written are opened by this function: a named pipe would
    block until it is written to, a device may never end, and a sparse file may have any length.

    Parameters
    ----------
    who : str
        First word of error messages.
    path : str or Path
    at_most : int, optional
        Largest plausible size, in B; by default any.
    folder : Path, optional
        In which the file must be, see `path_inside`.

    Raises
    ------
    OSError
        If the file does not exist, is not a regular file or cannot be read.
    ValueError
        If it is larger, consists of holes, or is not in the folder.
    """
    if folder is not None:
        path = path_inside(who, folder, Path(path).name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{who}: file {path} does not exist") from error
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise _irregular(who, path, "socket") from error
        raise _unreadable(who, path, error) from error
    except ValueError as error:  # a name with a zero byte
        raise OSError(f"{who}: cannot read {str(path)!r}: {error}") from error
    try:
        _check(who, path, descriptor, at_most)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check(who: str, path: str | Path, descriptor: int, at_most: int | None) -> None:
    """Raise an error if an open file is not regular or too large."""
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        number = errno.EISDIR
        raise _unreadable(who, path, IsADirectoryError(number, os.strerror(number)))
    if not stat.S_ISREG(status.st_mode):
        raise _irregular(who, path, _KINDS.get(stat.S_IFMT(status.st_mode), "special file"))
    size = status.st_size
    if at_most is not None and size > at_most:
        raise ValueError(f"{who}: {path} must have at most {at_most:,} B, got {size:,} B")
    if (stored := _stored(descriptor, size)) < size > max(MIN_LIMIT, MAX_RATIO * stored):
        raise ValueError(
            f"{who}: {path} has {size:,} B, of which {stored:,} B are on the disk and the others "
            "are holes; copy it again"
        )


def _stored(descriptor: int, size: int) -> int:
    """Return how many bytes of a file are not holes, or a number that is large enough."""
    stored = at = 0
    try:
        while at < size > max(MIN_LIMIT, MAX_RATIO * stored):
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, begin, os.SEEK_HOLE)
            stored += at - begin
    except OSError as error:
        if error.errno != errno.ENXIO:  # a file system without holes; otherwise the rest is one
            stored = size
    os.lseek(descriptor, 0, os.SEEK_SET)
    return stored


def read_file(
    who: str, path: str | Path, at_most: int | None = None, *, folder: Path | None = None
) -> bytes:
    """Return the content of a regular file, see `open_file`.

    Raises
    ------
    OSError
        If the file does not exist, is not a regular file or cannot be read.
    ValueError
        If it is larger, consists of holes, or is not in the folder.
    """
    with open_file(who, path, at_most, folder=folder) as file:
        try:
            return file.read()
        except OSError as error:
            raise _unreadable(who, path, error) from error


def path_inside(who: str, folder: Path, name: object, *, beside: Path | None = None) -> Path:
    """Return the path of a file that another file names, if it is in the folder itself.

    Parameters
    ----------
    who : str
        First word of error messages.
    folder : Path
    name : object
        Of the file, as it was read.
    beside : Path, optional
        A file in the folder. If it is a link, the file may be a link into the same other folder:
        caches of downloads consist of such links.

    Raises
    ------
    ValueError
        If the name is not a plain file name, or a symbolic link leads out of the folder.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and name.isprintable()
    if not plain or "/" in str(name) or "\\" in str(name):
        raise ValueError(
            f"{who}: expected plain names of files in {folder}, got {name!r:.200}; use files from "
            "a trusted source"
        )
    path = folder / str(name)
    try:
        resolved, root = path.resolve(), folder.resolve()
        linked = root if beside is None else beside.resolve().parent
    except (OSError, RuntimeError) as error:  # a loop of links; RuntimeError before Python 3.13
        raise ValueError(f"{who}: {path} is a link without a target; remove it") from error
    if resolved.parent not in (root, linked):
        raise ValueError(
            f"{who}: expected files in {folder}, got {path}, a link to {resolved}; replace it by a "
            "copy of the file"
        )
    return path


def check_expansion(name: str, packed: int, expanded: int) -> None:
    """Raise ValueError if compressed data expand to more bytes than is plausible.

    Readers call it with the length that a file specifies, before they allocate.

    Parameters
    ----------
    name : str
        Begins the sentence of an error.
    packed, expanded : int
        In B.
    """
    limit = max(MIN_LIMIT, MAX_RATIO * packed)
    if expanded > limit:
        raise ValueError(
            f"{name} expands from {packed:,} B to {expanded:,} B, more than {limit:,} B"
        )


def unwritable(who: str, path: str | Path, error: OSError) -> OSError:
    """Return an error of the same type with a message for a file that could not be written."""
    advice = "free some space or choose another folder"
    if error.errno not in _FULL:
        advice = "choose another folder"
    return type(error)(f"{who}: cannot write {path}: {_reason(error)}; {advice}")


def _unreadable(who: str, path: str | Path, error: OSError) -> OSError:
    return type(error)(f"{who}: cannot read {path}: {_reason(error)}")


def _irregular(who: str, path: str | Path, kind: str) -> OSError:
    return OSError(f"{who}: expected a regular file, got the {kind} {path}; remove or replace it")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def fill_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Create a folder with files and their checksums, and flush it to disk."""
    path.mkdir()
    add_files(path, files, SHA256, {})


def add_files(
    path: Path, files: Mapping[str, bytes], kind: Checksums, sums: Mapping[str, str]
) -> None:
    """Write files into a folder, and the checksums of all, and flush it to disk.

    Parameters
    ----------
    path : Path
    files : mapping of str to bytes
    kind : Sums
    sums : mapping of str to str
        Checksums of the files that the folder contains already.
    """
    own = {name: kind.of(data) for name, data in files.items()}
    text = "".join(f"{digest}  {name}\n" for name, digest in {**sums, **own}.items())
    for name, data in {**files, kind.file: text.encode()}.items():
        write_through(path / name, data)
    flush_directory(path)


def read_folder(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read files of a folder and compare them with their checksums.

    Raises
    ------
    ValueError
        If a file is missing, cannot be read or has changed.
    """
    sums = read_sums(path, SHA256)
    files = {name: _read(path, name, MAX_TEXT_B) for name in names}
    for name, data in files.items():
        check_digest(name, sums.get(name), SHA256.of(data))
    return files


def read_sums(path: Path, kind: Checksums) -> dict[str, str]:
    """Return the checksums of the files of a folder by name.

    Raises
    ------
    ValueError
        If their file cannot be read.
    """
    text = _read(path, kind.file, _MAX_SUMS_B).decode(errors="replace").removesuffix("\n")
    return {name: digest for digest, _, name in (line.partition("  ") for line in text.split("\n"))}


def check_digest(name: str, expected: str | None, found: str) -> None:
    """Raise ValueError if a file does not have its checksum."""
    if expected != found:
        raise ValueError(f"{name} does not match its checksum")


def _read(path: Path, name: str, at_most: int) -> bytes:
    limit = None if name.endswith(".safetensors") else at_most
    try:
        return read_file("it", path / name, limit, folder=path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} cannot be read ({str(error).removeprefix('it: ')})") from error


def parse_object(data: bytes, name: str, *versions: int) -> dict[str, Any]:
    """Return the object in a file's content.

    Parameters
    ----------
    data : bytes
    name : str
        Name of the file, for errors.
    *versions : int
        Possible values of "format".

    Raises
    ------
    ValueError
        If it is not a JSON object, or has another format.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{name} cannot be parsed ({reason})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{name} must contain an object")
    given = content.get("format")
    if type(given) is not int or given not in versions:
        expected = " or ".join(map(str, versions))
        raise ValueError(f"its format must be {expected} for this version of pydtnn, got {given}")
    return content
