"""Continue from a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, agree
from pydtnn.comm.agree import on_rank_0
from pydtnn.model.load_report import describe as describe_network
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.content import (
    Parts,
    State,
    Stateful,
    parts_of,
    read_content,
    unpack,
)
from pydtnn.training.checkpoint.folder import ARRAYS, STATE, find_checkpoints, read_checkpoint
from pydtnn.utils.errors import EXPLAINED, AgreedError, describe

_log = logging.getLogger("pydtnn.training.checkpoint")


def load_checkpoint(directory: str | Path, trainer: Training) -> Path | None:
    """Continue from the newest valid checkpoint in a folder.

    Collective: all ranks call it. Rank 0 reads the files and sends them to the others, which need
    no access to the folder. If the newest checkpoint is damaged or has invalid content, the
    preceding one is used, and the logger "pydtnn.training.checkpoint" logs a warning. Either every
    part of the trainer is loaded on every rank, or no part on any rank.

    Parameters
    ----------
    directory : str or Path
    trainer : Trainer
        Constructed as when the checkpoint was saved. Callbacks without saved state keep their
        initial state.

    Returns
    -------
    Path or None
        The checkpoint; None if there is none.

    Raises
    ------
    AgreedError
        On all ranks, if every checkpoint is damaged, or the selected one does not fit the trainer
        on one of them; the message contains the difference. The trainer is not changed.
    """
    comm = trainer.comm
    path, files = on_rank_0(comm, _read_newest, Path(directory)) or (None, {})
    path = comm.gather_object(path)[0]
    if path is None:
        return None
    files = _share(comm, files)
    saved = unpack(files)  # as on rank 0, which has unpacked it before
    frozen = trainer.model.frozen
    _freeze(trainer, saved["trainer"][0].get("frozen") or ())
    trainer.exchange.start(trainer.model.buckets)  # allocates the arrays that `load` fills
    parts = parts_of(trainer)
    before = {name: copy.deepcopy(part.state()) for name, part in parts.items()}
    error = None
    try:
        content = read_content(files[STATE])
        _check_network(content, saved["model"][0], trainer)
        _restore(saved, parts, trainer, content)
    except EXPLAINED as problem:
        error = ValueError(f"{path}: {problem}")
    try:
        agree(comm, error)
    except AgreedError:
        for name, part in parts.items():
            if before[name]:
                with contextlib.suppress(Exception):  # of this part; the others are restored
                    part.load(before[name])
        _freeze(trainer, frozen)
        raise
    _log.debug("loaded %s", path)
    return Path(path)


def _freeze(trainer: Training, frozen: Collection[str]) -> None:
    """Freeze the parameters that were frozen when a checkpoint was saved, and no others."""
    trainer.model.set_frozen(frozen)
    trainer.rebind()


def read_configuration(path: Path) -> dict[str, Any]:
    """Return the configuration that was saved with a checkpoint; empty if there was none.

    Raises
    ------
    ValueError
        If the checkpoint is damaged; the message contains its path.
    """
    try:
        content = read_content(read_checkpoint(path)[STATE])
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    configuration = content.get("configuration")
    return configuration if isinstance(configuration, dict) else {}


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Return parameters and running statistics of a checkpoint, as of `Model.state`.

    Raises
    ------
    ValueError
        If the checkpoint is damaged; the message contains its path.
    """
    try:
        return unpack(read_checkpoint(path))["model"][0]
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error


def _read_newest(directory: Path) -> tuple[Path, dict[str, bytes]] | None:
    """Read the newest valid checkpoint; log warnings about others."""
    problems: list[str] = []
    for path in reversed(find_checkpoints(directory)):
        try:
            files = read_checkpoint(path)
            unpack(files)
        except ValueError as error:
            problems.append(f"{path.name} cannot be used: {error}")
            continue
        for problem in problems:
            _log.warning("%s; %s is used instead", problem, path.name)
        return path, files
    if problems:
        raise ValueError(
            f"load_checkpoint: no checkpoint in {directory} is valid: {'; '.join(problems)}; "
            "start again in another folder"
        )
    return None


def _share(comm: Communicator, files: dict[str, bytes]) -> dict[str, bytes]:
    """Broadcast the contents that rank 0 has read. Collective: all ranks call it."""
    state, size = comm.gather_object((files.get(STATE), len(files.get(ARRAYS, b""))))[0]
    data = np.zeros(size, np.uint8)
    if comm.rank == 0:
        data[:] = np.frombuffer(files[ARRAYS], np.uint8)
    comm.broadcast(data)
    return {STATE: state, ARRAYS: data.tobytes()}


def _check_network(content: Mapping[str, Any], saved: State, trainer: Training) -> None:
    """Raise ValueError if the checkpoint describes its network and that is another one."""
    configuration = content.get("configuration")
    own, network = trainer.model.whole.describe(), describe_network(saved)
    if not isinstance(configuration, dict) or "model" not in configuration or own == network:
        return
    names = configuration["model"], configuration.get("dataset", "another data set")
    options = configuration.get("model_options")
    with_options = f" with {json.dumps(options)}" if options else ""
    raise ValueError(
        f"it is a checkpoint of {names[0]}{with_options} on {names[1]}, with {network}, but the "
        f"model has {own}; continue with that network, or train this one in another folder"
    )


def _restore(
    saved: Parts, parts: Mapping[str, Stateful], trainer: Training, content: Mapping[str, Any]
) -> None:
    """Load the state of every part: of this rank's position along "data", if there are several."""
    mesh, comm, data = trainer.setup.mesh, trainer.comm, trainer.setup.data
    local = content.get("local") or ()
    if local and (mesh is None or mesh.shape != content.get("mesh")):
        axes = ", ".join(f"{axis}={ranks}" for axis, ranks in dict(content["mesh"]).items())
        raise ValueError(
            f"the state of {local[0]} was saved per rank of the mesh {axes}, got "
            f"{mesh or 'no mesh'}; resume with this mesh"
        )
    for name, states in saved.items():
        ranks = comm.size if name in local else data.size
        if len(states) not in (1, ranks):
            raise ValueError(
                f"the state of {name} was saved per rank by {len(states)} ranks, got {ranks}; "
                f"resume with {len(states)} ranks"
            )
    whole = trainer.model.whole
    for name, part in parts.items():
        if name in saved:
            try:
                rank = comm.rank if name in local else data.rank
                state = saved[name][rank if len(saved[name]) > 1 else 0]
                part.load(state if name == "model" else whole.take(state))
            except KeyError as error:
                raise ValueError(
                    f"the state of {name} does not contain {error}, so it does not belong to a "
                    f"{type(part).__name__}; continue with the type with which it was saved"
                ) from error
            except EXPLAINED:
                raise
            except Exception as error:
                raise ValueError(
                    f"the state of {name} cannot be loaded by {type(part).__name__}: "
                    f"{describe(error)}"
                ) from error
