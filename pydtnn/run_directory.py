"""The folder of a run: chosen, made and tried before any work is done."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pydtnn.checkpoint import find_checkpoints
from pydtnn.comm import Communicator, agree
from pydtnn.config import TrainConfig


def run_directory(config: TrainConfig, comm: Communicator) -> Path:
    """Return the folder of the run, after rank 0 has made it and written a file there.

    Collective: all ranks call it. Without `--output-dir` it is the first free one of
    ``runs/MODEL-DATASET-1``, ``-2``, ...

    Raises
    ------
    AgreedError
        On all ranks, if the folder cannot be written, or holds another run's checkpoints and
        `--resume` is not given.
    """
    path, problem = None, None
    if comm.rank == 0:
        try:
            path = _choose(config)
            if not config.evaluate_only:
                _try_to_write(path)
        except (OSError, ValueError) as error:
            problem = ValueError(str(error))
    problems = comm.gather_object(problem)
    agree(comm, problems[0])
    return Path(comm.gather_object(path)[0])


def _choose(config: TrainConfig) -> Path:
    if config.output_dir is None:
        stem = f"{Path(config.model.partition(':')[0]).stem}-{config.dataset}"
        number = 1
        while (path := Path("runs") / f"{stem}-{number}").exists():
            number += 1
        return path
    path = Path(config.output_dir)
    if not config.resume and not config.evaluate_only and find_checkpoints(path):
        raise ValueError(
            f"--output-dir: {path} holds the checkpoints of an earlier run; "
            "add --resume to continue it, or choose another folder"
        )
    return path


def _try_to_write(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(
            f"--output-dir: cannot write to {path}: {(error.strerror or str(error)).lower()}; choose another folder"
        ) from None
