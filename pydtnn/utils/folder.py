"""Folders of files with checksums, in the format of ``sha256sum --check``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydtnn.utils.files import flush_directory, read_file, write_through

SUMS = "SHA256SUMS"


def fill_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Create a folder with files and their checksums, and flush it to disk."""
    sums = "".join(f"{_digest(data)}  {name}\n" for name, data in files.items())
    path.mkdir()
    for name, data in {**files, SUMS: sums.encode()}.items():
        write_through(path / name, data)
    flush_directory(path)


def read_folder(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Read files of a folder and compare them with their checksums.

    Raises
    ------
    ValueError
        If a file is missing, cannot be read or has changed.
    """
    text = _read(path, SUMS).decode(errors="replace")
    sums = {
        name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())
    }
    files = {name: _read(path, name) for name in names}
    for name, data in files.items():
        if sums.get(name) != _digest(data):
            raise ValueError(f"{name} does not match its checksum")
    return files


def _read(path: Path, name: str) -> bytes:
    try:
        return read_file("it", path / name)
    except OSError as error:
        raise ValueError(f"{name} cannot be read ({str(error).removeprefix('it: ')})") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
