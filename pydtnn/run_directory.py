"""The folder of a run: chosen, made and tried before any work is done."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydtnn.checkpoint import find_checkpoints
from pydtnn.comm import Communicator
from pydtnn.config import TrainConfig
from pydtnn.files import unwritable
from pydtnn.rank0 import on_rank_0

RUNS = Path("runs")
"""Where runs go that are not told where."""


@contextlib.contextmanager
def run_directory(config: TrainConfig, comm: Communicator) -> Iterator[Path]:
    """Make the folder of the run, and try to write there.

    Collective: all ranks call it; rank 0 makes and tries. Without `--output-dir` it is the first
    free one of ``runs/MODEL-DATASET-1``, ``-2``, ...; runs that start at the same moment get
    different ones. A folder that is still empty in the end is removed again. Nothing is made for
    `--evaluate-only`.

    Raises
    ------
    AgreedError
        On all ranks, if the folder or that of `--save` cannot be written, if another run is
        writing there, or if it holds another run's checkpoints and `--resume` is not given.
    """
    made: list[Path] = []
    with contextlib.ExitStack() as held:
        path = comm.gather_object(on_rank_0(comm, _prepare, config, made, held))[0]
        try:
            yield path
        finally:
            for folder in made:
                with contextlib.suppress(OSError):  # mostly because it is not empty
                    folder.rmdir()


def _prepare(config: TrainConfig, made: list[Path], held: contextlib.ExitStack) -> Path:
    """Return the folder of the run, which is ours until `held` is closed.

    What did not exist before is added to `made`, innermost first.
    """
    if config.save:
        save = Path(config.save)
        if save.is_dir():
            raise ValueError(f"--save: {save} is a folder; give the name of a file in it")
        _make("--save", save.parent, made)
    if config.evaluate_only:
        return Path(config.output_dir or ".")
    if config.output_dir is None:
        return _next_free(config, made)
    path = Path(config.output_dir)
    _make("--output-dir", path, made)
    _claim(path, held)
    if not config.resume and find_checkpoints(path):
        raise ValueError(
            f"--output-dir: {path} holds the checkpoints of an earlier run; add --resume to "
            "continue it, or choose another folder"
        )
    return path


def _claim(path: Path, held: contextlib.ExitStack) -> None:
    """Keep other runs from writing in the folder too, until `held` is closed or this process ends.

    Such as one that the queue starts again while the first still runs. Some network file systems
    cannot lock a folder; there it is as if nobody else came.
    """
    descriptor = os.open(path, os.O_RDONLY)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"--output-dir: another run is writing in {path}; wait for its end, or choose another "
            "folder"
        ) from None
    except OSError:
        return


def _next_free(config: TrainConfig, made: list[Path]) -> Path:
    name = "-".join(Path(of.rpartition(":")[2]).name for of in (config.model, config.dataset))
    number = 1
    while True:
        path = RUNS / f"{name}-{number}"
        if not path.exists():
            with contextlib.suppress(FileExistsError):  # another run was faster
                _make("--output-dir", path, made, exist_ok=False)
                return path
        number += 1


def _make(who: str, path: Path, made: list[Path], *, exist_ok: bool = True) -> None:
    """Make a folder and try to write in it."""
    try:
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=exist_ok)
        made.extend(new)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        if exist_ok:
            raise NotADirectoryError(f"{who}: {path} is a file; choose another folder") from None
        raise
    except OSError as error:
        raise unwritable(who, path, error) from error
