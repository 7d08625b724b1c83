"""Continue from a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pydtnn.checkpoint.content import Parts, check_format, parts_of, unpack
from pydtnn.checkpoint.folder import ARRAYS, STATE, find_checkpoints, read_checkpoint
from pydtnn.comm import Communicator, agree
from pydtnn.rank0 import on_rank_0

if TYPE_CHECKING:
    from pydtnn.trainer import Trainer

_log = logging.getLogger("pydtnn.checkpoint")


def load_checkpoint(directory: str | Path, trainer: Trainer) -> Path | None:
    """Continue from the newest checkpoint in a folder that is whole.

    Collective: all ranks call it. Rank 0 reads and tells the others, so they need not see the
    folder. Where the newest is damaged, the one before it is taken, and the logger
    "pydtnn.checkpoint" warns of that.

    Parameters
    ----------
    directory : str or Path
    trainer : Trainer
        Built as it was when the checkpoint was saved. Callbacks that the checkpoint does not know
        start afresh.

    Returns
    -------
    Path or None
        The checkpoint; None where there is none at all.

    Raises
    ------
    AgreedError
        On all ranks, if every checkpoint is damaged, or the one taken does not fit the trainer,
        naming what differs.
    """
    comm = trainer.comm
    path, files = on_rank_0(comm, _read_newest, Path(directory)) or (None, {})
    path = comm.gather_object(path)[0]
    if path is None:
        return None
    trainer.exchange.start(trainer.model.buckets)  # what it sets up, its state then fills
    error = None
    try:
        _restore(unpack(_share(comm, files)), trainer)
    except (TypeError, ValueError) as problem:
        error = ValueError(f"{path}: {problem}")
    agree(comm, error)
    return Path(path)


def _read_newest(directory: Path) -> tuple[Path, dict[str, bytes]] | None:
    """Read the newest checkpoint that is whole, and warn of those that are not."""
    problems: list[str] = []
    for path in reversed(find_checkpoints(directory)):
        try:
            files = read_checkpoint(path)
            check_format(files[STATE])
        except ValueError as error:
            problems.append(f"{path.name} cannot be used: {error}")
            continue
        for problem in problems:
            _log.warning("%s; %s is taken instead", problem, path.name)
        return path, files
    if problems:
        raise ValueError(
            f"load_checkpoint: no checkpoint in {directory} is whole: {'; '.join(problems)}; "
            "start again in another folder"
        )
    return None


def _share(comm: Communicator, files: dict[str, bytes]) -> dict[str, bytes]:
    """Tell all ranks the contents that rank 0 has read. Collective: all ranks call it."""
    state, size = comm.gather_object((files.get(STATE), len(files.get(ARRAYS, b""))))[0]
    data = np.zeros(size, np.uint8)
    if comm.rank == 0:
        data[:] = np.frombuffer(files[ARRAYS], np.uint8)
    comm.broadcast(data)
    return {STATE: state, ARRAYS: data.tobytes()}


def _restore(parts: Parts, trainer: Trainer) -> None:
    """Hand every part its state."""
    size = trainer.comm.size
    for name, states in parts.items():
        if len(states) not in (1, size):
            raise ValueError(
                f"the state of {name} differed between {len(states)} ranks; "
                f"resume with {len(states)} ranks, not {size}"
            )
    for name, part in parts_of(trainer).items():
        if name in parts:
            part.load(parts[name][trainer.comm.rank if len(parts[name]) > 1 else 0])
