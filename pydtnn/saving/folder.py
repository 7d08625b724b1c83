"""The folder of a saved model: written atomically, replaced only if it contains nothing else.

- ``weights.safetensors``: parameters and running statistics, see `pydtnn.weights`,
- ``model.json``: layers, connections and inputs,
- ``SHA256SUMS``: their checksums.

It is written under another name and renamed once, and an earlier one is renamed before it is
removed; `existing` finds it also after an interruption between the two.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydtnn.saving.weights import BEST, WEIGHTS
from pydtnn.utils.files import (
    MAX_TEXT_B,
    SHA256,
    fill_folder,
    flush_directory,
    read_file,
    read_folder,
    unwritable,
)
from pydtnn.utils.names import shorten

MODEL = "model.json"


def check_replaceable(who: str, path: Path) -> None:
    """Raise ValueError if a model cannot be saved at a path because of what is there.

    Raises
    ------
    ValueError
    """
    if not path.name:
        raise ValueError(f"{who}: expected the name of a new folder, got {path}; name one in it")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ValueError(
            f"{who}: {path} is a file, and a model is saved as a folder; choose another path"
        )
    if path.is_dir():
        present = {other.name for other in path.iterdir()}
        others = sorted(present - {WEIGHTS, MODEL, SHA256.file})
        if others or (present and MODEL not in present):
            raise ValueError(
                f"{who}: folder {path} is not a saved model, as it contains {shorten(others, 3)}; "
                "choose another path"
            )


def write_model(who: str, path: Path, files: Mapping[str, bytes]) -> None:
    """Write the folder of a model; an existing one is replaced.

    Parameters
    ----------
    who : str
        First word of error messages.
    path : Path
    files : mapping of str to bytes
        Contents of `WEIGHTS` and `MODEL`.

    Raises
    ------
    OSError
        If it cannot be written; an existing folder is not changed.
    ValueError
        If something else is there.
    """
    partial = path.with_name(f".{path.name}.partial") if path.name else path
    check_replaceable(who, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        fill_folder(partial, files)
        if path.exists():
            shutil.rmtree(_aside(path), ignore_errors=True)
            path.rename(_aside(path))  # a folder cannot be renamed onto one that is not empty
        partial.rename(path)
        flush_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            existing(path).rename(path)
        raise unwritable(who, path, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if path.exists():
            shutil.rmtree(_aside(path), ignore_errors=True)


def read_model(who: str, path: Path) -> dict[str, bytes]:
    """Read the files of a saved model and compare them with their checksums.

    Of the folder of a run they are `MODEL` and `BEST`, which has a checksum of its own.

    Raises
    ------
    OSError
        If there is no such folder.
    ValueError
        If it is not a saved model, or a file has changed.
    """
    place = existing(path)
    if not place.exists():
        raise FileNotFoundError(f"{who}: folder {path} does not exist")
    if not place.is_dir():
        raise ValueError(
            f"{who}: expected the folder of a saved model, got the file {path}; use "
            "pydtnn.weights.load_weights for a file of weights"
        )
    if not (place / MODEL).exists():
        raise ValueError(f"{who}: folder {path} is not a saved model: it does not contain {MODEL}")
    if not (place / SHA256.file).exists() and not (place / WEIGHTS).exists():
        if not (place / BEST).exists():
            raise ValueError(
                f"{who}: {path} contains no weights; a run has {BEST} after its first epoch"
            )
        return {
            WEIGHTS: read_file(who, place / BEST),
            MODEL: read_file(who, place / MODEL, MAX_TEXT_B),
        }
    try:
        return read_folder(place, (WEIGHTS, MODEL))
    except ValueError as error:
        raise ValueError(f"{who}: {path}: {error}; the model is damaged: copy it again") from error


def existing(path: Path) -> Path:
    """Return the path of a model, or the one to which an interrupted replacement has renamed it."""
    return path if path.exists() or not _aside(path).exists() else _aside(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced") if path.name else path
