"""Continue training without ranks that have failed, from the state of those that remain.

Where all ranks have all of the state, those that remain agree on the last step that one of them has
completed. Its state is sent to all of them, also to those that had it: they are then equal for
certain. No copy of the state is kept while no rank fails: an update begins when the last message of
the step has arrived (`Optimizer.needs_all_gradients`), so that every rank has the state before a
step or after it, and never a part of an update. Callbacks that have not been called at the end of
the step or epoch are called by the trainer that continues (`Trainer.pending`).

Otherwise (networks that are cut, sharded optimizers, residuals, ranks that train independently)
every rank keeps a snapshot, at an interval of steps: the whole arrays of what ranks have parts of,
and its own of what differs between ranks. Of the latter it also has that of another rank, its
partner, on another host if there are several. All remaining ranks return to the last snapshot that
all of them have; what a failed rank had alone is merged into the state of the rank with the copy.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

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


def capture(trainer: Trainer) -> Saved:
    """Return the state of a trainer that is not used any more. It sends no message."""
    trainer.exchange.comm = Serial()  # what is averaged are the values of this rank alone
    trainer.exchange.in_flight.forget()  # messages of the group that has failed never arrive
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
    partner : int
        First number of the rank of which this one has a copy.
    copy : dict of str to dict
        What only that rank has.
    """

    saved: Saved
    members: tuple[int, ...]
    iterations: int
    partner: int
    copy: dict[str, State]

    @property
    def key(self) -> tuple[Position, tuple[int, ...]]:
        """Equal for the snapshots of all ranks after the same step."""
        return self.saved.position, self.members


def take_snapshot(trainer: Trainer) -> Snapshot:
    """Copy the state of this rank and of its partner. Collective: all ranks call it."""
    comm, whole = trainer.comm, trainer.model.whole
    states: dict[str, State] = {}
    gather_parameters(trainer.exchange)
    for name, part in parts_of(trainer).items():
        state = part.state()
        states[name] = state if name in ("model", "exchange") else whole.gather(state)
    states = {
        name: {key: np.array(v) if isinstance(v, np.ndarray) else v for key, v in state.items()}
        for name, state in states.items()
        if state
    }
    saved = Saved(
        position_of(trainer),
        states,
        trainer.pending,
        trainer.logs,
        [*trainer.losses],
        trainer.samples_seen,
    )
    names = ("exchange",) if trainer.exchange.equal else ("model", "optimizer", "exchange")
    own = {name: states[name] for name in names if name in states}
    # Ranks of a host follow each other: so many places further is another host.
    shift = max(map(comm.hosts.count, {*comm.hosts})) % comm.size if comm.size > 1 else 0
    shift = shift or min(1, comm.size - 1)
    copy = _send_round(comm, pickle.dumps(own, pickle.HIGHEST_PROTOCOL), shift)
    partner = comm.members[(comm.rank - shift) % comm.size]
    iterations = trainer.optimizer.iterations
    return Snapshot(saved, tuple(comm.members), iterations, partner, pickle.loads(copy))


def _send_round(comm: Communicator, data: bytes, shift: int) -> bytes:
    """Send data to the rank `shift` places further; return those of the rank as far before."""
    lengths = comm.gather_object(len(data))
    if comm.size == 1:
        return data
    source = (comm.rank - shift) % comm.size
    out, into = np.frombuffer(data, np.uint8).copy(), np.empty(lengths[source], np.uint8)
    received = comm.irecv(into, source, _TAG)
    comm.isend(out, (comm.rank + shift) % comm.size, _TAG).wait()
    received.wait()
    return into.tobytes()


_TAG = (1 << 15) - 1
"""Tag of copies, which are sent between steps."""

SAMPLES, ERROR = "samples", "error/"


def merge(own: dict[str, State], lost: dict[str, State], *, equal: bool) -> dict[str, State]:
    """Return the state of a rank with that of a rank that has failed.

    Compression errors are added: what has not been sent is owed to the sum. Where ranks train with
    different parameters, these are averaged, as are the arrays of the optimizer, weighted by the
    samples since ranks have last averaged: the next average is then that of all ranks.
    """
    weights = [float(states.get("exchange", {}).get(SAMPLES, 0)) for states in (own, lost)]
    total = sum(weights)
    share = weights[0] / total if total else 0.5
    result = dict(own)
    for part, state in lost.items():
        mine = result[part] = dict(own.get(part, {}))
        for name, theirs in state.items():
            before = mine.get(name)
            if name == SAMPLES:
                mine[name] = int(total)
            elif not isinstance(before, np.ndarray) or before.dtype.kind != "f":
                continue
            elif name.startswith(ERROR):
                mine[name] = before + theirs
            elif not equal:
                mine[name] = (share * before + (1 - share) * theirs).astype(before.dtype)
    return result


class RecoveryState:
    """The state from which this rank continues if others fail.

    Parameters
    ----------
    interval : Interval
        Time or steps between snapshots, if not all ranks have all of the state.
    mtbf : float
        Mean time between two failures in s, from which an interval of `AUTO` follows.

    Attributes
    ----------
    trainer : Trainer or None
        The trainer that runs, once its state is that of all ranks.
    saved : Saved or None
        The state on which the ranks have agreed, until a trainer has it.
    snapshots : list of Snapshot
        The last two: a rank may fail while the others take one. Empty if all ranks have all state.
    lost_steps : int
        Steps that were complete before the last agreement, and are repeated.
    """

    def __init__(self, interval: Interval, mtbf: float) -> None:
        self.trainer: Trainer | None = None
        self.saved: Saved | None = None
        self.snapshots: list[Snapshot] = []
        self.lost_steps = 0
        self._interval, self._mtbf = interval, mtbf
        self._equal, self._iterations = True, 0
        self._timer: Timer | None = None

    def begin(self, trainer: Trainer) -> None:
        """Called when training begins or continues. Collective: all ranks call it."""
        self._timer = None
        if is_replicated(trainer):
            self.trainer, self.saved, self.snapshots = trainer, None, []
        else:
            self._equal = trainer.exchange.equal
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

    def _take(self, trainer: Trainer) -> None:
        begin = clock.now()
        self.snapshots = [*self.snapshots[-1:], take_snapshot(trainer)]
        if self._timer is not None:
            self._timer.restart(clock.now() - begin)

    @property
    def position(self) -> Position | None:
        """How far this rank is; None before training has begun."""
        if self.trainer is not None:
            return position_of(self.trainer)
        return None if self.saved is None else self.saved.position

    def agree(self, comm: Communicator) -> Saved | None:
        """Return the state to continue from; None to begin again.

        Collective: all remaining ranks call it. If further ranks fail meanwhile, it can be called
        again on another communicator.
        """
        if self.trainer is not None:
            self._iterations = self.trainer.optimizer.iterations
        if any(comm.gather_object(bool(self.snapshots))):
            return self._return_to_snapshot(comm)
        self.lost_steps = 0
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

    def _return_to_snapshot(self, comm: Communicator) -> Saved | None:
        """Return this rank's state in the last snapshot that all remaining ranks have."""
        own = {snapshot.key: snapshot for snapshot in self.snapshots}
        common = set.intersection(*map(set, comm.gather_object([*own])))
        completed = max(comm.gather_object(self._iterations))
        self.trainer, self.saved = None, None
        if not common:
            self.snapshots = []
            return None
        found = own[max(common)]
        self.lost_steps = completed - found.iterations
        saved = found.saved
        if found.partner not in comm.members and found.partner in found.members:
            states = merge(saved.states, found.copy, equal=self._equal)
            saved = replace(saved, states=states)
        self.saved = saved
        return saved


def _broadcast(comm: Communicator, data: bytes, root: int) -> bytes:
    """Send the data of a rank to all others."""
    length = comm.gather_object(len(data))[root]
    array = np.frombuffer(data, np.uint8).copy() if comm.rank == root else np.empty(length, "u1")
    comm.broadcast(array, root)
    return array.tobytes()
