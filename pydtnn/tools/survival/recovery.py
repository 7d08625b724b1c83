"""Continue training without ranks that have failed, from the state of those that remain.

Where all ranks have all of the state, those that remain agree on the last step that one of them has
completed. Its state is sent to all of them, also to those that had it: they are then equal for
certain. No copy of the state is kept while no rank fails: an update begins when the last message of
the step has arrived (`Optimizer.needs_all_gradients`), so that every rank has the state before a
step or after it, and never a part of an update. Callbacks that have not been called at the end of
the step or epoch are called by the trainer that continues (`Trainer.pending`).

Otherwise (networks that are cut, sharded optimizers, residuals, ranks that train independently)
every rank keeps a snapshot, at an interval of steps: the whole arrays of what ranks have parts of,
and its own of what differs between ranks. All remaining ranks return to the last snapshot that all
of them have; what a failed rank had alone is lost. If every stage of a pipeline is on several ranks
(`--survive stages=recycle`), each also copies its own stages after every step: while one rank of
each stage remains, their last copies are the state, and nothing is lost.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.serial import Serial
from pydtnn.parallel.exchange import AllReduce, gather_parameters
from pydtnn.training.checkpoint.content import State, parts_of
from pydtnn.training.checkpoint.timer import Timer
from pydtnn.training.logs import Logs
from pydtnn.training.trainer import Trainer
from pydtnn.utils import clock
from pydtnn.utils.interval import Interval

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


def is_replicated(trainer: Trainer) -> bool:
    """Return whether all ranks have all of the state."""
    exchange, mesh = trainer.exchange, trainer.setup.mesh
    cut = mesh is not None and bool(mesh.model_axes)
    return type(exchange) is AllReduce and not exchange.sums.keeps_gradients and not cut


def position_of(trainer: Trainer) -> Position:
    """Return how far a trainer is; of two positions, the later is the larger."""
    pending = trainer.pending
    return trainer.epoch, trainer.step, pending is None, 0 if pending is None else pending[1]


def _saved(trainer: Trainer, states: dict[str, State]) -> Saved:
    return Saved(
        position_of(trainer),
        {name: state for name, state in states.items() if state},
        trainer.pending,
        trainer.logs,
        [*trainer.losses],
        trainer.samples_seen,
    )


def capture(trainer: Trainer) -> Saved:
    """Return the state of a trainer that is not used any more. It sends no message."""
    trainer.exchange.comm = Serial()  # what is averaged are the values of this rank alone
    trainer.exchange.in_flight.forget()  # messages of the group that has failed never arrive
    return _saved(trainer, {name: part.state() for name, part in parts_of(trainer).items()})


def restore(trainer: Trainer, saved: Saved) -> None:
    """Load the state into a trainer that has just been created. Collective: all ranks call it."""
    trainer.recovered = True  # callbacks keep their states
    trainer.model.set_frozen(saved.states["trainer"]["frozen"])
    trainer.rebind()
    trainer.exchange.start(trainer.model.buckets)
    for name, part in parts_of(trainer).items():
        if name in saved.states:
            state = saved.states[name]
            part.load(state if name == "model" else trainer.model.whole.take(state))
    trainer.pending, trainer.logs = saved.pending, saved.logs
    trainer.losses, trainer.samples_seen = [*saved.losses], saved.samples_seen
    trainer.model.backend.autotuner.frozen = True


@dataclass
class Snapshot:
    """The state of a rank after a step.

    Attributes
    ----------
    saved : Saved
    members : tuple of int
        All ranks, by their first numbers.
    iterations : int
        Updates made.
    """

    saved: Saved
    members: tuple[int, ...]
    iterations: int

    @property
    def key(self) -> tuple[Position, tuple[int, ...]]:
        """Equal for the snapshots of all ranks after the same step."""
        return self.saved.position, self.members


def take_snapshot(trainer: Trainer) -> Snapshot:
    """Copy the state of this rank. Collective: all ranks call it."""
    states: dict[str, State] = {}
    gather_parameters(trainer.exchange)
    for name, part in parts_of(trainer).items():
        state = part.state()
        if name not in ("model", "exchange"):
            state = trainer.model.whole.gather(state)
        states[name] = state
    return _copied(trainer, states)


def copy_own(trainer: Trainer) -> Snapshot:
    """Copy the state of this rank's stages. It sends no message, unless a callback's state does."""
    parts = [(name, part) for name, part in parts_of(trainer).items() if name != "model"]
    states = {name: part.state() for name, part in parts}
    states["model"] = trainer.model.own_state()
    return _copied(trainer, states)


def _copied(trainer: Trainer, states: dict[str, State]) -> Snapshot:
    states = {
        name: {
            key: np.array(value) if isinstance(value, np.ndarray) else value
            for key, value in state.items()
        }
        for name, state in states.items()
    }
    members, iterations = tuple(trainer.comm.members), trainer.optimizer.iterations
    return Snapshot(_saved(trainer, states), members, iterations)


def join(comm: Communicator, states: dict[str, State], names: Collection[str]) -> bool:
    """Add the arrays of other stages to a state; return whether those of all names are there.

    Collective: all ranks call it, with states after the same step. Arrays that several ranks have
    become those of the first one: running statistics differ between pipelines.
    """
    own = {
        (part, name): (value.shape, value.dtype)
        for part, state in states.items()
        for name, value in state.items()
        if isinstance(value, np.ndarray)
    }
    everywhere = comm.gather_object(own)
    owners: dict[tuple[str, str], int] = {}
    for rank, theirs in enumerate(everywhere):
        for place in theirs:
            owners.setdefault(place, rank)
    if not {*names} <= {name for part, name in owners if part == "model"}:
        return False
    for (part, name), root in owners.items():
        if not all((part, name) in theirs for theirs in everywhere):
            array = np.empty(*everywhere[root][part, name])
            if comm.rank == root:
                array[...] = states[part][name]
            comm.broadcast(array.reshape(-1), root)
            states.setdefault(part, {})[name] = array
    return True


class RecoveryState:
    """The state from which this rank continues if others fail.

    Parameters
    ----------
    interval : Interval
        Time or steps between snapshots, if not all ranks have all of the state.
    mtbf : float
        Mean time between two failures in s, from which an interval of `AUTO` follows.
    peers : bool
        Whether every stage of a pipeline is on several ranks. Each then copies its own stages after
        every step, of which those that remain make the whole state.

    Attributes
    ----------
    trainer : Trainer or None
        The trainer that runs, once its state is that of all ranks.
    saved : Saved or None
        The state on which the ranks have agreed, until a trainer has it.
    snapshots : list of Snapshot
        The last two: a rank may fail while the others take one. Empty if all ranks have all state.
    recent : list of Snapshot
        The state of this rank's stages after the last two steps, with `peers`.
    lost_steps : int
        Steps that were complete before the last agreement, and are repeated.
    """

    def __init__(self, interval: Interval, mtbf: float, peers: bool = False) -> None:
        self.trainer: Trainer | None = None
        self.saved: Saved | None = None
        self.snapshots: list[Snapshot] = []
        self.recent: list[Snapshot] = []
        self.lost_steps = 0
        self._peers, self._names = peers, frozenset[str]()
        self._interval, self._mtbf = interval, mtbf
        self._iterations = 0
        self._timer: Timer | None = None

    def begin(self, trainer: Trainer) -> None:
        """Called when training begins or continues. Collective: all ranks call it."""
        self._timer, self.recent = None, []
        self._names = frozenset(trainer.model.whole.shapes)
        if is_replicated(trainer):
            self.trainer, self.saved, self.snapshots = trainer, None, []
        else:
            if self._interval.steps is None:
                self._timer = Timer(self._interval.seconds, self._mtbf)
            self._take(trainer)
            self.trainer, self.saved = trainer, None

    def after_step(self, trainer: Trainer) -> None:
        """Called after a step, to keep a snapshot if it is time. Collective: all ranks call it."""
        steps, due = self._interval.steps, False
        if self._timer is not None:
            due = self._timer.is_due(trainer.comm)
        elif self.snapshots and steps is not None:
            due = trainer.optimizer.iterations % steps == 0
        if due:
            self._take(trainer)
        if self._peers and type(trainer.exchange) is AllReduce:  # others divide the state
            self.recent = [*self.recent[-1:], copy_own(trainer)]

    def _take(self, trainer: Trainer) -> None:
        begin = clock.now()
        self.snapshots = [*self.snapshots[-1:], take_snapshot(trainer)]
        if self._timer is not None:
            self._timer.restart(clock.now() - begin)

    def agree(self, comm: Communicator) -> Saved | None:
        """Return the state to continue from; None to begin again.

        Collective: all remaining ranks call it. If further ranks fail meanwhile, it can be called
        again on another communicator.
        """
        position = None if self.saved is None else self.saved.position  # None: before training
        if self.trainer is not None:
            position = position_of(self.trainer)
            self._iterations = self.trainer.optimizer.iterations
        if any(comm.gather_object(bool(self.snapshots))):
            return self._return_to_snapshot(comm)
        self.lost_steps = 0
        positions = comm.gather_object(position)
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

    def _return_to_snapshot(self, comm: Communicator) -> Saved | None:
        """Return this rank's state in the last snapshot that all remaining ranks have."""
        completed = max(comm.gather_object(self._iterations))
        found = _last_common(comm, self.recent)
        if found is None or not join(comm, found.saved.states, self._names):
            found = _last_common(comm, self.snapshots)
        self.trainer, self.saved = None, None
        if found is None:
            self.snapshots = []
            return None
        self.lost_steps = completed - found.iterations
        self.saved = found.saved
        return self.saved


def _last_common(comm: Communicator, snapshots: Sequence[Snapshot]) -> Snapshot | None:
    """Return this rank's snapshot after the last step of which all ranks have one."""
    own = {snapshot.key: snapshot for snapshot in snapshots}
    common = set.intersection(*map(set, comm.gather_object([*own])))
    return own[max(common)] if common else None


def _broadcast(comm: Communicator, data: bytes, root: int) -> bytes:
    """Send the data of a rank to all others."""
    length = comm.gather_object(len(data))[root]
    array = np.frombuffer(data, np.uint8).copy() if comm.rank == root else np.empty(length, "u1")
    comm.broadcast(array, root)
    return array.tobytes()
