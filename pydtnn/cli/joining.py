"""More ranks for a run, between two epochs: ``python -m pydtnn.launch --join RUN``.

A request in the folder of the run asks for them. At the end of an epoch the run saves a checkpoint
and ends with a status for which its launcher starts it again with more ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from pydtnn.callbacks import Callback
from pydtnn.cli.config import AUTO_PARALLEL, TrainConfig, read_axes
from pydtnn.cli.run_directory import claim, make_folder, no_run, remove_empty
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint import save_checkpoint
from pydtnn.training.checkpoint.folder import checkpoint_path
from pydtnn.training.run_folder import is_run, read_about
from pydtnn.utils.errors import AgreedError, MoreRanksError
from pydtnn.utils.files import read_file, write_file

REQUEST = "join.json"
"""File with the number of ranks that are to join the run."""

LAUNCHER = "launch.json"
"""File that `pydtnn.launch` locks while it runs, with its number of ranks and its mesh."""

_MAX_B = 1 << 12

_log = logging.getLogger("pydtnn.run")


def more(axes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the axes of a mesh on more ranks: only `data` is longer.

    Raises
    ------
    ValueError
        If the parts of the network do not divide the ranks.

    >>> more({"data": 2, "filter": 2}, 6), more({"pipeline": 2}, 4)
    ({'data': 3, 'filter': 2}, {'data': 2, 'pipeline': 2})
    """
    model = {axis: n for axis, n in axes.items() if axis != "data"}
    parts = prod(model.values())
    if ranks % parts:
        raise ValueError(
            f"expected a multiple of {parts} ranks, the parts of the network, got {ranks}; have "
            f"{-ranks % parts} more join"
        )
    return {"data": ranks // parts, **model}


def ask(folder: Path, ranks: int) -> str:
    """Ask a run for more ranks; return a line for the user.

    Parameters
    ----------
    folder : Path
    ranks : int
        How many join the present ones.

    Raises
    ------
    ValueError, OSError
        If there is no such run, it has ended, `pydtnn.launch` has not started it, its launcher has
        no number of ranks, or its mesh does not divide the ranks.
    """
    launcher, about = launcher_of(folder), {}
    if is_run(folder):
        about = read_about("launch: --join", folder)
    if launcher is None and not is_run(folder):
        raise ValueError(f"launch: --join: {no_run(folder)}")
    if launcher is None:
        raise ValueError(f"launch: --join: {_why_alone(folder, about)}")
    if not launcher.get("ranks"):
        raise ValueError(
            f"launch: --join: the command of {folder} has no number of ranks that can be changed; "
            "start it as python -m pydtnn.launch -- mpirun -np 4 python -m pydtnn.train ..."
        )
    if type(about.get("ranks")) is not int:
        raise ValueError(f"launch: --join: {folder} has not begun to train; try again later")
    if (folder / REQUEST).exists():
        raise FileExistsError(
            f"launch: --join: {requested(folder)} ranks have been asked for in {folder / REQUEST}, "
            "which has not been done yet; wait for the end of the epoch, or remove the file"
        )
    total = about["ranks"] + ranks
    try:
        mesh_on(total, launcher.get("parallel"))
    except ValueError as error:
        raise ValueError(f"launch: --join: {error}") from error
    write_file("launch: --join", folder / REQUEST, json.dumps({"ranks": ranks}).encode())
    return f"{folder}: continues on {total} instead of {about['ranks']} ranks after this epoch"


def mesh_on(ranks: int, given: str | None) -> str | None:
    """Return the value of `--parallel` for another number of ranks than that of a given one.

    Raises
    ------
    ValueError
        If the parts of the network do not divide the ranks.
    """
    if not given or given == AUTO_PARALLEL:
        return given
    return ",".join(f"{axis}={n}" for axis, n in more(read_axes(given), ranks).items())


def _why_alone(folder: Path, about: Mapping[str, Any]) -> str:
    """Return why no launcher would start the run in a folder again."""
    if not about.get("ended"):
        with contextlib.ExitStack() as held:
            try:
                claim(folder, held)
            except BlockingIOError:
                return (
                    f"{folder} has not been started by pydtnn.launch, which starts it again with "
                    "more ranks; end it by Ctrl-C, and continue with python -m pydtnn.launch -- "
                    f"mpirun ... python -m pydtnn.train --resume {folder}"
                )
    return f"{folder} has ended; continue with --resume {folder} on more ranks"


def launcher_of(folder: Path) -> dict[str, Any] | None:
    """Return what the launcher of a run has written, if it is running."""
    file = folder / LAUNCHER
    with contextlib.ExitStack() as held, contextlib.suppress(OSError, ValueError):
        content = json.loads(read_file("launch: --join", file, _MAX_B))
        try:
            locked = not claim(file, held)  # not known on this file system
        except BlockingIOError:
            locked = True
        return content if locked and isinstance(content, dict) else None
    return None


@contextlib.contextmanager
def joinable(folder: Path, config: TrainConfig, ranks: int) -> Iterator[None]:
    """Context of a launcher, in which ranks may join its run.

    Parameters
    ----------
    folder : Path
        Of the run; a new one that remains empty is removed.
    config : TrainConfig
    ranks : int
        0 if the launcher cannot change the number of ranks.

    Raises
    ------
    BlockingIOError
        If another launcher is running there.
    """
    file, made = folder / LAUNCHER, list[Path]()
    make_folder("launch", folder, made)
    with contextlib.ExitStack() as held:
        file.touch()
        try:
            claim(file, held)
        except BlockingIOError:
            raise BlockingIOError(
                f"launch: another pydtnn.launch is running in {folder}; choose another folder"
            ) from None
        try:
            file.write_text(json.dumps({"ranks": ranks, "parallel": config.parallel}))
            (folder / REQUEST).unlink(missing_ok=True)  # of an earlier launcher
            yield
        finally:
            with contextlib.suppress(OSError):
                file.unlink()
            remove_empty(made)


def requested(folder: Path) -> int:
    """Return how many ranks are to join the run in a folder, 0 if it has no valid request."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        ranks = json.loads(read_file("launch: --join", folder / REQUEST, _MAX_B))["ranks"]
        return ranks if type(ranks) is int and ranks > 0 else 0
    return 0


class Joining(Callback):
    """End the run after an epoch if ranks are to join it.

    Parameters
    ----------
    directory : Path
        Of the run.
    config : TrainConfig
    """

    reads_gradients = False

    def __init__(self, directory: Path, config: TrainConfig) -> None:
        self.directory, self.config = directory, config
        self._epochs = 0

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Store the number of epochs."""
        self._epochs = epochs

    def on_epoch_end(self, trainer: Training) -> None:
        """Look for a request. Collective: all ranks call it.

        Raises
        ------
        MoreRanksError
            On all ranks, when a checkpoint has been saved.
        """
        over = trainer.stop or trainer.epoch >= self._epochs
        asked = not over and trainer.comm.rank == 0 and requested(self.directory)
        ranks = trainer.comm.gather_object(asked if asked and launcher_of(self.directory) else 0)[0]
        if ranks and self._save(trainer):
            raise MoreRanksError(
                f"training has ended after epoch {trainer.epoch} to continue with {ranks} more "
                f"rank{'s' * (ranks > 1)}"
            )

    def _save(self, trainer: Training) -> bool:
        """Save a checkpoint, if there is none of this step; return whether there is one."""
        for callback in trainer.callbacks:
            callback.on_interrupt(trainer)
        path = checkpoint_path(self.directory, trainer.optimizer.iterations)
        if trainer.comm.gather_object(path.exists())[0]:
            return True
        course, keep = self.config.course(), self.config.keep
        try:
            save_checkpoint(self.directory, trainer, config=course, keep=keep)
        except AgreedError as error:
            _log.warning("%s; no ranks join", error)
            return False
        return True
