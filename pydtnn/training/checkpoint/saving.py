"""Save a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.content import Parts, State, checksum, pack, parts_of, split
from pydtnn.training.checkpoint.folder import checkpoint_path, write_checkpoint
from pydtnn.training.mesh import first_ranks


def save_checkpoint(
    directory: str | Path,
    trainer: Training,
    *,
    config: Mapping[str, Any] | None = None,
    keep: int = 3,
) -> Path:
    """Write ``checkpoint-<step>`` and remove all but the last `keep`.

    Collective: all ranks call it; rank 0 writes. Arrays are those of the whole network, for any
    mesh. If ranks train with different parameters, the
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
        On all ranks, if it cannot be written, for example on a full disk or without permission,
        or if ranks differ that must be equal. Earlier checkpoints are kept.
    """
    with trainer.setup.phase("checkpoint"):
        return _save(directory, trainer, dict(config or {}), keep)


def _save(directory: str | Path, trainer: Training, config: dict[str, Any], keep: int) -> Path:
    trainer.compare_ranks()
    with trainer.averaged():
        parts, local = _gather(trainer)
    path = checkpoint_path(directory, trainer.optimizer.iterations)
    about = {
        "step": trainer.optimizer.iterations,
        "seed": trainer.model.seed,
        "configuration": config,
    }
    if local and trainer.setup.mesh is not None:
        about["mesh"], about["local"] = trainer.setup.mesh.shape, local

    def write() -> None:
        write_checkpoint(path, pack(parts, about), keep)

    on_rank_0(trainer.comm, write)
    return path


def _gather(trainer: Training) -> tuple[Parts, list[str]]:
    """Return the state of every part: one if all ranks agree, otherwise one of every rank.

    Collective: all ranks call it. Arrays are those of the whole network. States are compared by
    checksums. States that differ are sent to rank 0, arrays without conversion; on other ranks
    nothing is returned.

    Returns
    -------
    parts : dict of str to list of dict
        On a mesh, a list contains one state for each position along the axis "data".
    local : list of str
        Parts with arrays that cannot be combined: their lists contain one state of every rank.
    """
    comm, whole = trainer.comm, trainer.model.whole
    states = {name: part.state() for name, part in parts_of(trainer).items()}
    states = {n: state if n == "model" else whole.gather(state) for n, state in states.items()}
    states = {name: state for name, state in states.items() if state}
    about = comm.gather_object(
        {name: (checksum(state), whole.is_partial(state)) for name, state in states.items()}
    )
    names = dict.fromkeys(name for own in about for name in own)
    local = [name for name in names if any(own[name][1] for own in about if name in own)]
    first = first_ranks(trainer.setup.mesh, comm)
    result: Parts = {}
    for name in names:
        state, ranks = states.get(name, {}), range(comm.size) if name in local else first
        equal = name not in local and len({about[r].get(name, (b"",))[0] for r in ranks}) == 1
        result[name] = [state] if equal else _to_rank_0(comm, state, ranks)
    return ({}, []) if comm.rank > 0 else (result, local)


def _to_rank_0(comm: Communicator, state: State, ranks: Sequence[int]) -> list[State]:
    """Gather a state of some ranks on rank 0, which is the first. Collective: all ranks call it."""
    arrays, values = split(state)
    about = comm.gather_object((values, [(name, a.dtype, a.shape) for name, a in arrays.items()]))
    if comm.rank > 0:
        for array in arrays.values() if comm.rank in ranks else ():
            comm.send(np.ascontiguousarray(array).reshape(-1), to=0)
        return []
    gathered = [state]
    for rank in ranks[1:]:
        values, described = about[rank]
        received = {name: np.empty(shape, dtype) for name, dtype, shape in described}
        for array in received.values():
            comm.recv(array.reshape(-1), source=rank)
        gathered.append(received | values)
    return gathered
