"""Continue training without ranks that have died, from the state of those that live.

The living ranks agree on the last step that one of them has completed. Its state is sent to all of
them, also to those that had it: they are then equal for certain. No copy of the state is kept while
no rank dies: an update begins when the last message of the step has arrived
(`Optimizer.needs_all_gradients`), so that every rank has the state before a step or after it, and
never a part of an update. Callbacks that have not been called at the end of the step or epoch
are called by the trainer that continues (`Trainer.pending`).
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.serial import Serial
from pydtnn.training.checkpoint.content import State, parts_of
from pydtnn.training.logs import Logs
from pydtnn.training.trainer import Trainer

Position = tuple[int, int, bool, int]
"""Epoch and step; whether all callbacks have been called at their end, and otherwise how many."""


@dataclass
class Saved:
    """The state of a trainer.

    Attributes
    ----------
    position : tuple
    states : dict of str to dict
        State of every part, see `pydtnn.training.checkpoint`.
    pending : tuple of str and int, or None
        See `Trainer.pending`.
    logs : Logs
    losses : list of float
    samples_seen : int
    """

    position: Position
    states: dict[str, State]
    pending: tuple[str, int] | None
    logs: Logs
    losses: list[float]
    samples_seen: int


def why_not_recovered(trainer: Trainer) -> str:
    """Return what would be lost with a rank; an empty string if all ranks have all of the state."""
    exchange, mesh = trainer.exchange, trainer.setup.mesh
    if mesh is not None and mesh.model_axes:
        return f"each rank of {mesh} has a part of the network"
    if exchange.sums.keeps_gradients:
        return f"the errors of {type(exchange.sums).__name__} are those of one rank"
    if not exchange.replicated:
        return f"ranks of {type(exchange).__name__} have state that no other rank has"
    return ""


def position_of(trainer: Trainer) -> Position:
    """Return how far a trainer is; of two positions, the later is the larger."""
    pending = trainer.pending
    return trainer.epoch, trainer.step, pending is None, 0 if pending is None else pending[1]


def capture(trainer: Trainer) -> Saved:
    """Return the state of a trainer that is not used any more. It sends no message."""
    trainer.exchange.comm = Serial()  # what is averaged are the values of this rank alone
    states = {name: part.state() for name, part in parts_of(trainer).items()}
    return Saved(
        position_of(trainer),
        {name: state for name, state in states.items() if state},
        trainer.pending,
        trainer.logs,
        trainer.losses,
        trainer.samples_seen,
    )


def restore(trainer: Trainer, saved: Saved) -> None:
    """Load the state into a trainer that has just been created. Collective: all ranks call it."""
    trainer.model.set_frozen(saved.states["trainer"]["frozen"])
    trainer.rebind()
    trainer.exchange.start(trainer.model.buckets)
    for name, part in parts_of(trainer).items():
        if name in saved.states:
            part.load(saved.states[name])
    trainer.pending, trainer.logs = saved.pending, saved.logs
    trainer.losses, trainer.samples_seen = [*saved.losses], saved.samples_seen
    trainer.model.backend.autotuner.frozen = trainer.recovered = True


class Memory:
    """The state from which this rank continues if others die.

    Attributes
    ----------
    trainer : Trainer or None
        The trainer that runs, once its state is that of all ranks.
    saved : Saved or None
        The state on which the ranks have agreed, until a trainer has it.
    """

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.saved: Saved | None = None

    def begin(self, trainer: Trainer) -> None:
        """Called when training begins or continues."""
        self.trainer, self.saved = trainer, None

    @property
    def position(self) -> Position | None:
        """How far this rank is; None before training has begun."""
        if self.trainer is not None:
            return position_of(self.trainer)
        return None if self.saved is None else self.saved.position

    def agree(self, comm: Communicator) -> Saved | None:
        """Return the state to continue from; None to begin again.

        Collective: all living ranks call it. If further ranks die meanwhile, it can be called
        again on another communicator.
        """
        positions = comm.gather_object(self.position)
        known = [position for position in positions if position is not None]
        if not known:
            return None
        source, data = positions.index(max(known)), b""
        if comm.rank == source:
            if self.trainer is not None:
                self.saved = capture(self.trainer)
                self.trainer = None
            data = pickle.dumps(self.saved, pickle.HIGHEST_PROTOCOL)
        saved = pickle.loads(_broadcast(comm, data, source))
        self.saved, self.trainer = saved, None
        return self.saved


def _broadcast(comm: Communicator, data: bytes, root: int) -> bytes:
    """Send the data of a rank to all others."""
    length = comm.gather_object(len(data))[root]
    array = np.frombuffer(data, np.uint8).copy() if comm.rank == root else np.empty(length, "u1")
    comm.broadcast(array, root)
    return array.tobytes()
