"""The communication volume of a rank: every call is counted, timed and reported here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from pydtnn.utils import clock
from pydtnn.utils.observer import Kind, Observer
from pydtnn.utils.request import Forwarding, Request


@dataclass
class Traffic:
    """Communication volume of a rank, and the time that it was blocked.

    A communicator counts the calls of its public methods, in the same object as the groups that are
    split off from it and as communicators that wrap it: a call is counted once, however many
    communicators forward it.

    Attributes
    ----------
    messages : int
        Number of collective calls with arrays, and of messages sent.
    bytes : int
        Bytes that this rank must send for them, in B: of a collective, the minimum of algorithms.
    seconds : float
        Time spent inside communication calls, in s, hence not overlapped with computation.
    observer : Observer or None
        Receives every call, with the bytes that are counted for it, every wait, and every message
        between this rank and another one, those of schedules included. Set by `observe`.
    usual : Observer or None
        The observer while there is no other one.
    caller : str
        The method in progress that all ranks call, see `pydtnn.utils.collective`.
    """

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    observer: Observer | None = None
    usual: Observer | None = None
    caller: str = ""

    @property
    def within(self) -> str:
        """The caller for errors of calls: " in Trainer.evaluate"."""
        return f" in {self.caller}" if self.caller else ""

    def observe(self, observer: Observer | None) -> None:
        """Report to an observer; None: to `usual`."""
        self.observer = self.usual if observer is None else observer

    def count(self, sent: float) -> int:
        """Count one call that sends `sent` bytes, and return them as an integer."""
        nbytes = round(sent)
        self.messages += 1
        self.bytes += nbytes
        return nbytes

    @contextmanager
    def apart(self) -> Iterator[Traffic]:
        """Count the messages of the ``with`` block separately; time is counted as usual.

        Yields the separate counters. The messages of a step that is captured in a CUDA graph are
        counted this way, and added by `repeat` for each replay, which makes no calls. The observer
        receives the replays only.
        """
        before, part = (self.messages, self.bytes, self.observer), Traffic()
        self.observer = None
        try:
            yield part
        finally:
            part.messages, part.bytes = self.messages - before[0], self.bytes - before[1]
            self.messages, self.bytes, self.observer = before

    @contextmanager
    def counted(self, also: Traffic) -> Iterator[None]:
        """Count the messages of the ``with`` block in `also`, too."""
        messages, nbytes = self.messages, self.bytes
        try:
            yield
        finally:
            also.messages += self.messages - messages
            also.bytes += self.bytes - nbytes

    def repeat(self, part: Traffic) -> None:
        """Add the messages of `part`, which were counted separately, once more."""
        self.messages += part.messages
        self.bytes += part.bytes
        if self.observer is not None:
            self.observer.begin(Kind.CALL, "replay", nbytes=part.bytes)
            self.observer.end()


class CountedCall(AbstractContextManager[None]):
    """Context of a call of a communicator, whose duration is counted and which is reported.

    A context instead of a function that makes the call, so that the call's stack is not deeper.

    Parameters
    ----------
    traffic : Traffic
    kind, name, nbytes
        See `Observer.begin`.
    group : str
        Name of the group of ranks.
    """

    __slots__ = ("_observer", "_start", "_traffic")

    def __init__(self, traffic: Traffic, kind: Kind, name: str, group: str, nbytes: int) -> None:
        self._traffic, self._observer = traffic, traffic.observer
        if self._observer is not None:
            self._observer.group(group)
            self._observer.begin(kind, name, nbytes=nbytes)

    def __enter__(self) -> None:
        self._start = clock.now()

    def __exit__(self, *error: object) -> None:
        self._traffic.seconds += clock.now() - self._start
        if self._observer is not None:
            self._observer.end()


class CountedRequest(Forwarding):
    """A request whose waits and tests are counted and reported.

    Parameters
    ----------
    inner : Request
    traffic : Traffic
    name, group : str
        See `CountedCall`.
    """

    def __init__(self, inner: Request, traffic: Traffic, name: str, group: str) -> None:
        super().__init__(inner)
        self._traffic, self._name, self._group = traffic, name, group

    def wait(self) -> None:
        with CountedCall(self._traffic, Kind.WAIT, self._name, self._group, 0):
            self.inner.wait()

    def test(self) -> bool:
        with CountedCall(self._traffic, Kind.CALL, "test", self._group, 0):
            return self.inner.test()


class ReportedMessage(Forwarding):
    """A request that reports when it was first known to be complete."""

    def __init__(self, inner: Request, report: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._report: Callable[[int], None] | None = report

    def wait(self) -> None:
        self.inner.wait()
        self._complete()

    def test(self) -> bool:
        done = self.inner.test()
        if done:
            self._complete()
        return done

    def _complete(self) -> None:
        if self._report is not None:
            report, self._report = self._report, None
            report(clock.now_ns())
