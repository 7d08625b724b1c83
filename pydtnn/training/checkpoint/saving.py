"""Save a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.rank0 import on_rank_0
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.content import (
    Parts,
    State,
    Stateful,
    checksum,
    pack,
    parts_of,
    split,
)
from pydtnn.training.checkpoint.folder import checkpoint_path, write_checkpoint


def save_checkpoint(
    directory: str | Path,
    trainer: Training,
    *,
    config: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write ``checkpoint-<step>`` and remove all but the last `keep`.

    Collective: all ranks call it; rank 0 writes. If ranks train with different parameters, the
    model's part is their average, and the exchange's part contains those of each rank. Running
    statistics are first made equal on all ranks, which affects training: to give the same bytes,
    runs on several ranks must save at the same steps.

    Parameters
    ----------
    directory : str or Path
        Folder of one run: checkpoints of later steps are removed too.
    trainer : Trainer
        Between two steps.
    config : mapping, optional
        Additional content of `state.json`; JSON values only.
    keep : int

    Returns
    -------
    Path
        The checkpoint.

    Raises
    ------
    AgreedError
        On all ranks, if it cannot be written, for example on a full disk or without permission.
        Earlier checkpoints are kept.
    """
    with trainer.averaged():
        parts = _gather(trainer.comm, parts_of(trainer))
    path = checkpoint_path(directory, trainer.optimizer.iterations)
    about = {
        "step": trainer.optimizer.iterations,
        "seed": trainer.model.seed,
        "configuration": dict(config or {}),
    }

    def write() -> None:
        write_checkpoint(path, pack(parts, about), keep)

    on_rank_0(trainer.comm, write)
    return path


def _gather(comm: Communicator, parts: Mapping[str, Stateful]) -> Parts:
    """Return the state of every part: one if all ranks agree, otherwise one of every rank.

    Collective: all ranks call it. States are compared by checksums. States that differ are sent to
    rank 0, arrays without conversion; on other ranks nothing is returned.
    """
    states = {name: state for name, part in parts.items() if (state := part.state())}
    checksums = comm.gather_object({name: checksum(state) for name, state in states.items()})
    names = dict.fromkeys(name for own in checksums for name in own)
    equal = {name for name in names if len({own.get(name) for own in checksums}) == 1}
    different = [name for name in names if name not in equal]
    ranks = _to_rank_0(comm, [states.get(name, {}) for name in different]) if different else []
    if comm.rank > 0:
        return {}
    gathered = dict(zip(different, zip(*ranks, strict=True), strict=True))
    return {name: [states[name]] if name in equal else [*gathered[name]] for name in names}


def _to_rank_0(comm: Communicator, states: list[State]) -> list[list[State]]:
    """Gather states on rank 0, which returns those of every rank. Collective: all ranks call it."""
    own = [split(state) for state in states]
    about = comm.gather_object(
        [
            (values, [(name, a.dtype, a.shape) for name, a in arrays.items()])
            for arrays, values in own
        ]
    )
    if comm.rank > 0:
        for arrays, _ in own:
            for array in arrays.values():
                comm.send(np.ascontiguousarray(array).reshape(-1), to=0)
        return []
    ranks = [states]
    for rank in range(1, comm.size):
        ranks.append([])
        for values, described in about[rank]:
            arrays = {name: np.empty(shape, dtype) for name, dtype, shape in described}
            for array in arrays.values():
                comm.recv(array.reshape(-1), source=rank)
            ranks[-1].append(arrays | values)
    return ranks
