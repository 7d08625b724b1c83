"""The folder of a run: chosen, created and tested for writing before training."""

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
from pydtnn.saving import check_replaceable
from pydtnn.training.callback import Callback, Training
from pydtnn.training.checkpoint import find_checkpoints, tidy
from pydtnn.utils.files import remove_unfinished, unwritable

RUNS = Path("runs")
"""Parent of the folders of runs without `--output-dir`."""

FILES = ("run.json", "history.csv", "history.json", "best.safetensors")
"""Files that a run writes besides checkpoints."""

_LOST = "was removed or renamed while the run was writing in it"

_log = logging.getLogger("pydtnn.run")


@contextlib.contextmanager
def run_directory(config: TrainConfig, comm: Communicator) -> Iterator[Path]:
    """Create the folder of the run and test that it is writable.

    Collective: all ranks call it; rank 0 creates and tests. Without `--output-dir` the folder is
    the first free one of ``runs/MODEL-DATASET-1``, ``-2``, ...; runs that start simultaneously get
    different ones. A folder that is empty at the end is removed. No folder is created for
    `--evaluate-only`. Unfinished files of killed runs are removed.

    Raises
    ------
    AgreedError
        On all ranks, if the folder or that of `--save` is not writable, if another run is writing
        there, or if it contains checkpoints of another run and `--resume` is not set. At the end,
        if the folder has been replaced.
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
                with contextlib.suppress(OSError):  # usually because it is not empty
                    folder.rmdir()


def _prepare(config: TrainConfig, made: list[Path], held: contextlib.ExitStack) -> Path:
    """Return the folder of the run, locked until `held` is closed.

    Folders that are created are appended to `made`, innermost first.
    """
    if config.save:
        save = Path(config.save)
        if not config.saves_weights:
            check_replaceable("train: --save", save)
        elif save.is_dir():
            raise ValueError(
                f"train: --save: expected a file, got the folder {save}; name a file in it"
            )
        _make("train: --save", save.parent, made)
    if config.evaluate_only:
        return Path(config.output_dir or ".")
    if config.output_dir is None:
        return _next_free(config, made)
    path = Path(config.output_dir)
    _make("train: --output-dir", path, made)
    if _claim(path, held):
        tidy(path)
        remove_unfinished(path, FILES)
    if not config.resume and find_checkpoints(path):
        raise ValueError(
            f"train: --output-dir: {path} contains checkpoints of an earlier run; add --resume to "
            "continue it, or choose another folder"
        )
    return path


def _claim(path: Path, held: contextlib.ExitStack) -> bool:
    """Lock the folder against other runs until `held` is closed or this process ends.

    A batch system may restart a run while the first one is still active. Returns False on network
    file systems that cannot lock a folder; other runs are then not detected.
    """
    descriptor = os.open(path, os.O_RDONLY)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"train: --output-dir: another run is writing in {path}; wait until it ends, or choose "
            "another folder"
        ) from None
    except OSError:
        return False
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a folder, to detect that it was replaced; None if it is absent."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _require_same(path: Path, identity: tuple[int, int] | None) -> None:
    if _identity(path) != identity:
        raise FileNotFoundError(
            f"train: --output-dir: {path} {_LOST}; files written before that are missing from it"
        )


class RunFolder(Callback):
    """Detect that the folder of the run was removed or renamed, before other callbacks write there.

    The run continues in a new folder of the same name, so that its results are not lost, and the
    logger "pydtnn.run" emits a warning.

    Parameters
    ----------
    directory : Path
        Folder of the run; it must exist when training starts.
    every_steps : int, optional
        Steps between writes within an epoch. Default: no writes within an epoch.
    """

    def __init__(self, directory: Path, *, every_steps: int | None = None) -> None:
        self.directory = directory
        self.every_steps = every_steps
        self._identity: tuple[int, int] | None = None
        self._held = contextlib.ExitStack()

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Store the identity of the folder, on rank 0."""
        self._identity = _identity(self.directory) if trainer.comm.rank == 0 else None

    def on_step_end(self, trainer: Training) -> None:
        """Check the folder if files will be written. Collective: all ranks call it."""
        if self.every_steps and trainer.optimizer.iterations % self.every_steps == 0:
            on_rank_0(trainer.comm, self._look)

    def on_epoch_end(self, trainer: Training) -> None:
        """Check the folder. Collective: all ranks call it.

        Raises
        ------
        AgreedError
            On all ranks, if the folder was replaced by another one, which other runs may use.
        """
        on_rank_0(trainer.comm, self._look)

    def on_interrupt(self, trainer: Training) -> None:
        """Check the folder. Collective: all ranks call it."""
        on_rank_0(trainer.comm, self._look)

    def close(self) -> None:
        """Release the lock of the new folder."""
        self._held.close()

    def _look(self) -> None:
        found = _identity(self.directory)
        if found == self._identity:
            return
        if found is not None:
            raise FileExistsError(
                f"train: --output-dir: {self.directory} has been replaced by another folder during "
                "the run; continue with --resume in the original folder"
            )
        _make("train: --output-dir", self.directory, [])
        _claim(self.directory, self._held)
        self._identity = _identity(self.directory)
        _log.warning("%s %s; the run continues in a new folder of that name", self.directory, _LOST)


def _next_free(config: TrainConfig, made: list[Path]) -> Path:
    name = "-".join(Path(of.rpartition(":")[2]).name for of in (config.model, config.dataset))
    number = 1
    while True:
        path = RUNS / f"{name}-{number}"
        if not path.exists():
            with contextlib.suppress(FileExistsError):  # another run has created it
                _make("train: --output-dir", path, made, exist_ok=False)
                return path
        number += 1


def _make(who: str, path: Path, made: list[Path], *, exist_ok: bool = True) -> None:
    """Create a folder and test that it is writable."""
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
            raise NotADirectoryError(
                f"{who}: expected a folder, got the file {path}; choose another folder"
            ) from None
        raise
    except OSError as error:
        raise unwritable(who, path, error) from error
