"""The folder of a run: chosen, made and tried before any work is done."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydtnn.cli.config import TrainConfig
from pydtnn.comm import Communicator
from pydtnn.comm.rank0 import on_rank_0
from pydtnn.training.callback import Callback, Training
from pydtnn.training.checkpoint import find_checkpoints, tidy
from pydtnn.utils.files import remove_unfinished, unwritable

RUNS = Path("runs")
"""Where runs go that are not told where."""

FILES = ("run.json", "history.csv", "history.json", "best.safetensors")
"""What a run writes there besides checkpoints."""

_LOST = "was removed or renamed while the run was writing in it"

_log = logging.getLogger("pydtnn.run")


@contextlib.contextmanager
def run_directory(config: TrainConfig, comm: Communicator) -> Iterator[Path]:
    """Make the folder of the run, and try to write there.

    Collective: all ranks call it; rank 0 makes and tries. Without `--output-dir` it is the first
    free one of ``runs/MODEL-DATASET-1``, ``-2``, ...; runs that start at the same moment get
    different ones. A folder that is still empty in the end is removed again. Nothing is made for
    `--evaluate-only`. What runs that were killed have left unfinished is removed.

    Raises
    ------
    AgreedError
        On all ranks, if the folder or that of `--save` cannot be written, if another run is
        writing there, or if it holds another run's checkpoints and `--resume` is not given. In the
        end, if it is not the folder any more that it was.
    """
    made: list[Path] = []
    with contextlib.ExitStack() as held:
        path = comm.gather_object(on_rank_0(comm, _prepare, config, made, held))[0]
        identity = _identity(path) if comm.rank == 0 else None
        try:
            yield path
            on_rank_0(comm, _require_same, path, identity)
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
    if _claim(path, held):
        tidy(path)
        remove_unfinished(path, FILES)
    if not config.resume and find_checkpoints(path):
        raise ValueError(
            f"--output-dir: {path} holds the checkpoints of an earlier run; add --resume to "
            "continue it, or choose another folder"
        )
    return path


def _claim(path: Path, held: contextlib.ExitStack) -> bool:
    """Keep other runs from writing in the folder too, until `held` is closed or this process ends.

    Such as one that the queue starts again while the first still runs. Some network file systems
    cannot lock a folder, where False is returned: then other runs are not noticed.
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
        return False
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    """Tell a folder from others that had or will have its name; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _require_same(path: Path, identity: tuple[int, int] | None) -> None:
    if _identity(path) != identity:
        raise FileNotFoundError(
            f"--output-dir: {path} {_LOST}: what it had written until then is not there"
        )


class RunFolder(Callback):
    """Notice that the folder of the run was removed or renamed, before others write there.

    The run goes on in a new folder of the same name, so that its results are not lost, and the
    logger "pydtnn.run" warns of that.

    Parameters
    ----------
    directory : Path
        Exists when training begins.
    every_steps : int, optional
        How often something is written within an epoch.
    """

    def __init__(self, directory: Path, *, every_steps: int | None = None) -> None:
        self.directory = directory
        self.every_steps = every_steps
        self._identity: tuple[int, int] | None = None
        self._held = contextlib.ExitStack()

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Remember the folder, on rank 0."""
        self._identity = _identity(self.directory) if trainer.comm.rank == 0 else None

    def on_step_end(self, trainer: Training) -> None:
        """Look at the folder if something will be written. Collective: all ranks call it."""
        if self.every_steps and trainer.optimizer.iterations % self.every_steps == 0:
            on_rank_0(trainer.comm, self._look)

    def on_epoch_end(self, trainer: Training) -> None:
        """Look at the folder. Collective: all ranks call it.

        Raises
        ------
        AgreedError
            On all ranks, if another folder is in its place, where others may be writing.
        """
        on_rank_0(trainer.comm, self._look)

    def close(self) -> None:
        """Let other runs write in the new folder."""
        self._held.close()

    def _look(self) -> None:
        found = _identity(self.directory)
        if found == self._identity:
            return
        if found is not None:
            raise FileExistsError(
                f"--output-dir: {self.directory} is not the folder any more in which this run "
                "began to write; continue it with --resume where that is now"
            )
        _make("--output-dir", self.directory, [])
        _claim(self.directory, self._held)
        self._identity = _identity(self.directory)
        _log.warning("%s %s; the run goes on in a new folder of that name", self.directory, _LOST)


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
