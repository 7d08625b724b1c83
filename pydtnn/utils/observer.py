"""Interface through which the parts of a run report what they are doing.

An activity has a beginning and an end; activities of a thread are nested. The loops over a graph,
the trainer, the loader's threads and every communicator notify the observers of a run. Without
observers there are no calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any

HALVES = (" (inputs)", " (parameters)")
"""What follows the name of a layer in the activities of the halves of its backward."""

RECOMPUTED = " (recomputed)"
"""Suffix of the names of forward passes that backward repeats."""


def layer_of(name: str) -> str:
    """Return the name of a layer from that of its activity.

    >>> layer_of("fc1 (recomputed)"), layer_of("fc1 (inputs)"), layer_of("fc1")
    ('fc1', 'fc1', 'fc1')
    """
    for suffix in (RECOMPUTED, *HALVES):
        name = name.removesuffix(suffix)
    return name


class Kind(IntEnum):
    """Kinds of activities.

    `PHASE` is a phase of training, by name: "start", "epoch", "data" (waiting for a batch), "step",
    and inside a step "forward", "loss", "backward", "exchange" and "update"; "evaluation",
    "checkpoint", and "callback" with the class of a callback. `FORWARD` and `BACKWARD` are those of
    a layer, by name; a forward pass that is repeated by recomputation has the suffix "
    (recomputed)", and the halves of backward those of `HALVES`. `KERNEL` is a call of a backend's
    kernel. `CALL` is a call of a communicator ("allreduce", "isend", ...), with "test" for a test
    of a request, `WAIT` one that waits for a request. `SENT` and `RECEIVED` are the messages of a
    rank, from the start of the operation to its completion, those of the rounds of a schedule
    included. `LOAD` is the work of a loader's thread.
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
        """Called before a step's phases "data" and "step".

        Parameters
        ----------
        epoch, step : int
            The epoch, and the number of the step within it, from 0.
        """

    def layers(self, layers: Mapping[str, Any]) -> None:
        """Called before the activities of a model, with its layers by the names of their nodes."""

    def samples(self, samples: int) -> None:
        """Called before the passes of a number of samples on this rank."""

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
            Number of the bucket that is exchanged or updated, or of the micro-batch that a stage of
            a pipeline computes; -1 for none.
        """

    def end(self) -> None:
        """Called when the activity that began last on this thread ends."""

    def activity(self, kind: Kind, name: str, bucket: int = -1) -> AbstractContextManager[None]:
        """Return the context of an activity, which is to be entered at once: see `begin`."""
        return Activity(self, kind, name, bucket)

    def group(self, name: str) -> None:
        """Called before each call and wait of a communicator begins, with `Communicator.name`."""

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

    def layers(self, layers: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.layers(layers)

    def samples(self, samples: int) -> None:
        for observer in self._observers:
            observer.samples(samples)

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        for observer in self._observers:
            observer.begin(kind, name, nbytes=nbytes, bucket=bucket)

    def end(self) -> None:
        for observer in self._observers:
            observer.end()

    def group(self, name: str) -> None:
        for observer in self._observers:
            observer.group(name)

    def message(self, *span: Any, **about: Any) -> None:
        for observer in self._observers:
            observer.message(*span, **about)


def combine(observers: Sequence[Observer]) -> Observer | None:
    """Return one observer for several; None if there are none.

    Raises
    ------
    TypeError
        If one is not an `Observer`.
    """
    for observer in observers:
        if not isinstance(observer, Observer):
            raise TypeError(
                f"observers: expected objects of a subclass of Observer, got {observer!r}; derive "
                "the class from pydtnn.utils.observer.Observer"
            )
    return None if not observers else observers[0] if len(observers) == 1 else Observers(observers)


class Activity(AbstractContextManager[None]):
    """An activity that begins and ends with a ``with`` block, also if the block raises.

    Parameters
    ----------
    observer : Observer
    kind, name, bucket
        See `Observer.begin`.
    """

    def __init__(self, observer: Observer, kind: Kind, name: str, bucket: int = -1) -> None:
        self._observer, self._kind, self._name, self._bucket = observer, kind, name, bucket

    def __enter__(self) -> None:
        self._observer.begin(self._kind, self._name, bucket=self._bucket)

    def __exit__(self, *error: object) -> None:
        self._observer.end()


class Interruption(AbstractContextManager[None]):
    """A ``with`` block in a phase that does not belong to it: the phase ends, and begins again.

    Parameters
    ----------
    observer : Observer
    name : str
        Of the phase.
    """

    def __init__(self, observer: Observer, name: str) -> None:
        self._observer, self._name = observer, name

    def __enter__(self) -> None:
        self._observer.end()

    def __exit__(self, *error: object) -> None:
        self._observer.begin(Kind.PHASE, self._name)


NO_ACTIVITY: AbstractContextManager[None] = nullcontext()
"""The context of an activity without observer."""


def phase(observer: Observer | None, name: str, bucket: int = -1) -> AbstractContextManager[None]:
    """Return the context of a phase of training, which an observer receives, if there is one."""
    return NO_ACTIVITY if observer is None else observer.activity(Kind.PHASE, name, bucket)


def outside(observer: Observer | None, name: str) -> AbstractContextManager[None]:
    """Return the context of what does not belong to the phase in which it is called."""
    return NO_ACTIVITY if observer is None else Interruption(observer, name)
