"""Interface through which the parts of a run report what they are doing.

An activity has a beginning and an end; activities of a thread are nested. The loops over a graph,
the trainer, the loader's threads and every communicator notify the observers of a run. Without
observers there are no calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Kind(IntEnum):
    """Kinds of activities.

    `PHASE` is a phase of training, by name: "start", "epoch", "data" (waiting for a batch), "step",
    and inside a step "forward", "loss", "backward", "exchange" and "update"; "evaluation",
    "checkpoint", "callback". `FORWARD` and `BACKWARD` are those of a layer, `KERNEL` a call of a
    backend's kernel. `CALL` is a call of a communicator ("allreduce", "isend", ...), `WAIT` one
    that waits for a request. `SENT` and `RECEIVED` are the messages of a rank, from the start of
    the operation to its completion, those of the rounds of a schedule included. `LOAD` is the work
    of a loader's thread.
    """

    PHASE = 0
    FORWARD = 1
    BACKWARD = 2
    KERNEL = 3
    CALL = 4
    WAIT = 5
    SENT = 6
    RECEIVED = 7
    LOAD = 8


class Observer:
    """Base class of observers; its methods do nothing.

    Each thread has its own observer (`lane`), so that no method needs a lock.
    """

    def lane(self, name: str) -> Observer:
        """Return the observer of another thread of this rank, such as "loader 0"."""
        return self

    def step(self, epoch: int, step: int) -> None:
        """Called when a step begins: its epoch and its number within the epoch."""

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        """Called when an activity begins.

        Parameters
        ----------
        kind : Kind
        name : str
            Of the phase, layer, kernel or call.
        nbytes : int
            Bytes that this rank sends, as counted by its communicator, in B.
        bucket : int
            Number of the bucket that is exchanged or updated; -1 for none.
        """

    def end(self) -> None:
        """Called when the activity that began last on this thread ends."""

    def message(
        self,
        kind: Kind,
        name: str,
        start: int,
        stop: int,
        *,
        peer: int,
        tag: int,
        nbytes: int,
    ) -> None:
        """Called when a message is complete.

        Parameters
        ----------
        kind : Kind
            `SENT` or `RECEIVED`.
        name : str
            Of the group of ranks, equal on all of them. The n-th message sent from one rank to
            another in a group with a tag is the n-th received.
        start, stop : int
            When it was started and when it was known to be complete, in ns of
            `time.perf_counter_ns`.
        peer : int
            The other rank, numbered among all ranks of the run.
        tag : int
        nbytes : int
            Its length in B.
        """


class Observers(Observer):
    """Several observers as one.

    Parameters
    ----------
    observers : sequence of Observer
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def lane(self, name: str) -> Observer:
        return Observers([observer.lane(name) for observer in self._observers])

    def step(self, epoch: int, step: int) -> None:
        for observer in self._observers:
            observer.step(epoch, step)

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        for observer in self._observers:
            observer.begin(kind, name, nbytes=nbytes, bucket=bucket)

    def end(self) -> None:
        for observer in self._observers:
            observer.end()

    def message(
        self,
        kind: Kind,
        name: str,
        start: int,
        stop: int,
        *,
        peer: int,
        tag: int,
        nbytes: int,
    ) -> None:
        for observer in self._observers:
            observer.message(kind, name, start, stop, peer=peer, tag=tag, nbytes=nbytes)


def combine(observers: Sequence[Observer]) -> Observer | None:
    """Return one observer for several; None if there are none."""
    return None if not observers else observers[0] if len(observers) == 1 else Observers(observers)
