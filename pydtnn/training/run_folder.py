"""The files in the folder of a run, and where such folders are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydtnn.data.inputs import Inputs
from pydtnn.saving.models import inputs_from_json, read_content
from pydtnn.saving.weights import BEST as BEST_FILE
from pydtnn.training.checkpoint import find_checkpoints
from pydtnn.utils.files import MAX_TEXT_B, read_file

RUN_FILE, HISTORY_FILE, MEASUREMENTS_FILE = "run.json", "history.json", "measurements.jsonl"

MODEL_FILE = "model.json"
"""File with the layers of the network, as in a saved model."""


def find_inputs(path: Path) -> Inputs | None:
    """Return what is known of the samples that weights were trained on, if anything.

    Parameters
    ----------
    path : Path
        A saved model, or the best weights of a run: beside both is `MODEL_FILE`.
    """
    file = (path if path.is_dir() else path.parent) / MODEL_FILE
    if not file.is_file() or (path.name != BEST_FILE and not path.is_dir()):
        return None
    content = read_content(read_file("load_weights", file, MAX_TEXT_B))
    return inputs_from_json(content)[1]


def is_run(path: Path) -> bool:
    """Return whether a folder has the options of a run, or a checkpoint."""
    return (path / RUN_FILE).is_file() or bool(find_checkpoints(path))


def find_runs(place: str | Path, depth: int = 1) -> list[Path]:
    """Return the folders of runs in a folder, newest first; none if it cannot be read.

    Parameters
    ----------
    place : str or Path
    depth : int
        Levels of folders that are searched; those of runs are not.
    """
    return [path for _, path in sorted(_runs_in(Path(place), depth), reverse=True)]


def _runs_in(place: Path, depth: int) -> list[tuple[float, Path]]:
    found = []
    try:
        for path in place.iterdir():
            if path.is_dir() and is_run(path):
                file = path / RUN_FILE
                found.append(((file if file.is_file() else path).stat().st_mtime, path))
            elif depth > 1 and path.is_dir() and not path.is_symlink():
                found += _runs_in(path, depth - 1)
    except OSError:
        return []
    return found


def read_about(who: str, folder: Path) -> dict[str, Any]:
    """Return the content of run.json; empty if there is none.

    Raises
    ------
    OSError, ValueError
        If the file is damaged, too large or not a regular file; `who` is the first word.
    """
    file = folder / RUN_FILE
    return dict(read_json(who, file, dict)) if file.is_file() else {}


def read_json(who: str, file: Path, kind: type) -> Any:
    """Return the object or list in a file of a run; `who` is the first word of errors."""
    data = read_file(who, file, MAX_TEXT_B)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged(who, file, "it cannot be parsed") from error
    if not isinstance(content, kind):
        raise damaged(who, file, f"it must contain {'a list' if kind is list else 'an object'}")
    return content


def damaged(who: str, file: Path, reason: str) -> ValueError:
    """Return the error about a file of a run."""
    return ValueError(f"{who}: {file} is damaged: {reason}; give the folder of another run")
