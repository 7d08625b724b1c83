"""Continue from a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, agree
from pydtnn.comm.agree import on_rank_0
from pydtnn.model.pieces import Piece
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.content import Parts, State, parts_of, prefix_of, split
from pydtnn.training.checkpoint.folder import find_checkpoints
from pydtnn.training.checkpoint.pieces import pieces_in_place
from pydtnn.training.checkpoint.reading import (
    Checkpoint,
    is_visible,
    read_checkpoint,
    read_into,
    read_part,
    read_state,
    rename,
    verify,
)
from pydtnn.utils.collective import collective
from pydtnn.utils.errors import EXPLAINED, AgreedError, describe

_log = logging.getLogger("pydtnn.training.checkpoint")


def load_checkpoint(directory: str | Path, trainer: Training) -> Path | None:
    """Continue from the newest valid checkpoint in a folder.

    Collective: all ranks call it. Each reads the ranges of arrays that it needs, into the arrays of
    model and optimizer; ranks without access to the folder receive them from others. If the newest
    checkpoint is damaged or has invalid content, the preceding one is used, and the logger
    "pydtnn.training.checkpoint" logs a warning. Either every part of the trainer is loaded on every
    rank, or no part on any rank.

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
        on one of them; the message contains the difference. The trainer is not changed, unless
        files that have been verified can no longer be read.
    """
    comm = trainer.comm
    with collective(comm, "load_checkpoint"):
        paths = comm.gather_object(on_rank_0(comm, find_checkpoints, directory))[0]
    found = _find_valid(comm, Path(directory), paths)
    if found is None:
        return None
    checkpoint, readers = found
    frozen = trainer.model.frozen
    saved = checkpoint.parts()
    _freeze(trainer, saved["trainer"][0].get("frozen") or ())
    trainer.exchange.start(trainer.model.buckets)  # allocates the arrays that `load` fills
    restoring = _Restoring(checkpoint, readers, saved, trainer)
    try:
        restoring.run()
    except AgreedError:
        restoring.undo()
        _freeze(trainer, frozen)
        raise
    _log.debug("loaded %s", checkpoint.path)
    return checkpoint.path


class _Restoring:
    """Loads the state of every part: of this rank's position along "data", if there are several.

    First everything is checked. Then parts load copies of their state, and those that fail restore
    the former state. Model and optimizer, whose arrays are large, are last: they are read in place,
    which cannot fail any more, so that no copy of their former state is necessary. A scheme whose
    ranks have own parameters replaces those of the model; only then are such copies made.
    """

    def __init__(
        self, checkpoint: Checkpoint, readers: Sequence[int], saved: Parts, trainer: Training
    ) -> None:
        self.checkpoint, self.readers, self.saved = checkpoint, readers, saved
        self.trainer, self.comm = trainer, trainer.comm
        self.parts = {n: part for n, part in parts_of(trainer).items() if n in saved}
        self.before: dict[str, State] = {}
        states = [*saved.get("exchange", ()), trainer.exchange.state()]
        self._own_parameters = any(split(state)[0] for state in states)
        model = trainer.model
        pieces = {name: pieces_in_place(part, model) for name, part in self.parts.items()}
        self.in_place = {name: found for name, found in pieces.items() if found is not None}

    def run(self) -> None:
        """Load all parts. Collective: all ranks call it."""
        others = [name for name in self.parts if name not in self.in_place]
        late = [name for name in others if name == "exchange" and self._own_parameters]
        for name, part in parts_of(self.trainer).items():
            if name not in self.in_place or late:
                self.before[name] = copy.deepcopy(part.state())
        self._together(self._check)
        copies = {name: self._copy_of(name) for name in others}
        pieces = [piece for _, own in copies.values() for piece in own]
        self._together(read_into, self.comm, self.checkpoint, pieces, self.readers)
        states = {name: state for name, (state, _) in copies.items()}
        self._together(self._load, {n: s for n, s in states.items() if n not in late})
        own = [
            rename(piece, self._prefix(name))
            for name, found in self.in_place.items()
            for piece in found
        ]
        self._together(read_into, self.comm, self.checkpoint, own, self.readers)
        self._finish()
        self._together(self._load, {name: states[name] for name in late})

    def undo(self) -> None:
        """Restore the former state of all parts that may have changed."""
        for name, part in parts_of(self.trainer).items():
            if self.before.get(name):
                with contextlib.suppress(Exception):  # of this part; the others are restored
                    part.load(self.before[name])

    def _together(self, work: Callable[..., object], *args: object) -> None:
        """Call `work`; if it fails on any rank, all raise AgreedError with the path."""
        error = None
        try:
            work(*args)
        except EXPLAINED as problem:
            error = ValueError(f"{self.checkpoint.path}: {problem}")
        agree(self.comm, error)

    def _check(self) -> None:
        """Raise ValueError if the state of a part does not belong to it, as far as is known."""
        content, trainer = self.checkpoint.content, self.trainer
        mesh, comm, data = trainer.setup.mesh, trainer.comm, trainer.setup.data
        local = content.get("local") or ()
        if local and (mesh is None or mesh.shape != content.get("mesh")):
            axes = ", ".join(f"{axis}={ranks}" for axis, ranks in dict(content["mesh"]).items())
            raise ValueError(
                f"the state of {local[0]} was saved per rank of the mesh {axes}, got "
                f"{mesh or 'no mesh'}; resume with this mesh"
            )
        for name, states in self.saved.items():
            ranks = comm.size if name in local else data.size
            if len(states) not in (1, ranks):
                raise ValueError(
                    f"the state of {name} was saved per rank by {len(states)} ranks, got {ranks}; "
                    f"resume with {len(states)} ranks"
                )
        whole, optimizer = trainer.model.whole, trainer.optimizer
        if "model" in self.in_place:
            whole.compare(self._state("model")).check(strict=True)
        if "optimizer" in self.in_place:
            state = self._state("optimizer")
            own = {n: value for n, value in state.items() if not whole.belongs_elsewhere(n)}
            optimizer.check_state(own, whole.shapes)

    def _number(self, name: str) -> int:
        """Return which of the states of a part is that of this rank."""
        if len(self.saved[name]) == 1:
            return 0
        local = self.checkpoint.content.get("local") or ()
        return self.comm.rank if name in local else self.trainer.setup.data.rank

    def _state(self, name: str) -> State:
        return self.saved[name][self._number(name)]

    def _prefix(self, name: str) -> str:
        return prefix_of(name, self._number(name), len(self.saved[name]))

    def _copy_of(self, name: str) -> tuple[State, list[Piece]]:
        """Return this rank's state of a part with new arrays, and their pieces to be read."""
        whole, pieces = self.trainer.model.whole, []
        result: State = {}
        for key, value in self._state(name).items():
            if whole.belongs_elsewhere(key):
                continue
            result[key] = value
            if isinstance(value, np.ndarray):
                result[key], piece = whole.allocate(key, value.shape, value.dtype)
                pieces.append(rename(piece, self._prefix(name)))
        return result, pieces

    def _load(self, states: Mapping[str, State]) -> None:
        for name, state in states.items():
            part = self.parts[name]
            try:
                part.load(state)
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

    def _finish(self) -> None:
        """Complete parts whose arrays have been read in place."""
        if "model" in self.in_place:
            self.trainer.model.replaced()
        if "optimizer" in self.in_place:
            state = self._state("optimizer")
            optimizer = self.trainer.optimizer
            optimizer.iterations = int(state["iterations"])
            optimizer.lr_factor = float(state["lr_factor"])


def _find_valid(
    comm: Communicator, directory: Path, paths: Sequence[Path]
) -> tuple[Checkpoint, list[int]] | None:
    """Return the newest valid checkpoint, and the ranks that can read its files.

    Collective: all ranks call it. Warnings about others are logged.
    """
    problems: list[str] = []
    for path in reversed(paths):
        found, problem = None, None
        if comm.rank == 0:
            try:
                found = read_checkpoint(path)
            except ValueError as error:
                problem = str(error)
        found, problem = comm.gather_object((found, problem))[0]
        readers: list[int] = []
        if found is not None:
            visible = comm.gather_object(is_visible(found))
            readers = [rank for rank in range(comm.size) if visible[rank]] or [0]
            reasons = comm.gather_object(_verify_share(comm, found, readers))
            problem = next(filter(None, reasons), None)
        if problem is None:
            for line in problems if comm.rank == 0 else ():
                _log.warning("%s; %s is used instead", line, path.name)
            return found, readers
        problems.append(f"{path.name} cannot be used: {problem}")
    if problems:
        raise AgreedError(
            f"load_checkpoint: no checkpoint in {directory} is valid: {'; '.join(problems)}; "
            "start again in another folder"
        )
    return None


def _verify_share(comm: Communicator, found: Checkpoint, readers: list[int]) -> str | None:
    """Verify this rank's share of the files; return what is wrong."""
    if comm.rank not in readers:
        return None
    try:
        verify(found, found.layout.files[readers.index(comm.rank) :: len(readers)])
    except ValueError as error:
        return str(error)
    return None


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
        content, *_ = read_state(path)
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
        checkpoint = read_checkpoint(path)
        verify(checkpoint, checkpoint.layout.files)
        return read_part(checkpoint, "model")
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
