"""A communicator that counts the messages, bytes and seconds of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydtnn.comm.communicator import Communicator, Message
from pydtnn.comm.request import Request
from pydtnn.comm.wrapper import Wrapper
from pydtnn.utils import clock
from pydtnn.utils.observer import Kind, Observer


class Messages:
    """The messages of this rank, in a group and in all groups split off from it or its parents.

    Attributes
    ----------
    observer : Observer or None
        Receives messages that start from now on; set by `observe`.
    """

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self._places: dict[int, int] = {}

    def observe(self, observer: Observer | None, members: Sequence[int]) -> None:
        """Report to an observer, or to none.

        Parameters
        ----------
        observer : Observer or None
        members : sequence of int
            The ranks of the run (`Communicator.members`); messages with others have the peer -1.
        """
        self._places = {rank: place for place, rank in enumerate(members)}
        self.observer = observer

    def reported(
        self,
        request: Request,
        kind: Kind,
        group: str,
        *,
        start: int,
        peer: int | None,
        members: Sequence[int],
        tag: int,
        size: int,
    ) -> Request:
        """Return a request that reports its message once it is complete.

        Parameters
        ----------
        request : Request
        kind, group, tag
            See `Observer.message`.
        start : int
            Time at which the message was started, in ns.
        peer : int or None
            The other rank in the group; None: the one that the request has received from.
        members : sequence of int
            The ranks of the group, by their numbers among all.
        size : int
            Length of the message in B.
        """
        observer = self.observer
        if observer is None:
            return request

        def report(stop: int) -> None:
            other = request.source if peer is None else peer
            place = self._places.get(members[other], -1)
            observer.message(kind, group, start, stop, peer=place, tag=tag, nbytes=size)

        return _Reported(request, report)


class _Reported(Request):
    """A request that reports when it was first known to be complete."""

    def __init__(self, inner: Request, report: Callable[[int], None]) -> None:
        self._inner = inner
        self._report: Callable[[int], None] | None = report

    @property
    def source(self) -> int:
        return self._inner.source

    def wait(self) -> None:
        self._inner.wait()
        self._complete()

    def test(self) -> bool:
        done = self._inner.test()
        if done:
            self._complete()
        return done

    def _complete(self) -> None:
        if self._report is not None:
            report, self._report = self._report, None
            report(clock.now_ns())


STARTS = {"send": "isend", "recv": "irecv"}
"""Names under which calls that start messages are reported."""


@dataclass
class Traffic:
    """Communication volume of a rank, and the time that it was blocked.

    Attributes
    ----------
    messages : int
        Number of collective calls with arrays, and of messages sent.
    bytes : int
        Bytes that this rank must send for them, in B: of a collective, the minimum of algorithms.
    seconds : float
        Time spent inside communication calls, in s, hence not overlapped with computation.
    observer : Observer or None
        Receives every call, with the bytes that are counted for it, and of every wait.
    """

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    observer: Observer | None = None

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

    def timed(self, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call and add its duration."""
        start = clock.now()
        try:
            return call(*args)
        finally:
            self.seconds += clock.now() - start

    def reported(
        self, kind: Kind, what: str, group: str, nbytes: int, call: Callable[..., Any], *args: Any
    ) -> Any:
        """Make a call, add its duration and report it to the observer."""
        observer = self.observer
        if observer is None:
            return self.timed(call, *args)
        observer.group(group)
        observer.begin(kind, what, nbytes=nbytes)
        try:
            return self.timed(call, *args)
        finally:
            observer.end()


class _MeteredRequest(Request):
    def __init__(self, inner: Request, traffic: Traffic, what: str, group: str) -> None:
        self.inner = inner
        self.traffic = traffic
        self.what, self.group = what, group

    @property
    def source(self) -> int:
        return self.inner.source

    def wait(self) -> None:
        self.traffic.reported(Kind.WAIT, self.what, self.group, 0, self.inner.wait)

    def test(self) -> bool:
        return bool(self.traffic.reported(Kind.CALL, "test", self.group, 0, self.inner.test))


class Metered(Wrapper):
    """Forward every call to another communicator and count it in `traffic`.

    Calls of groups that are split off are counted in the same object.

    Parameters
    ----------
    inner : Communicator
    traffic : Traffic, optional
        Counters to add to; by default new ones.
    """

    def __init__(self, inner: Communicator, traffic: Traffic | None = None) -> None:
        super().__init__(inner)
        self.traffic = traffic or Traffic()
        others = (self.size - 1) / self.size
        # How many times the bytes of its array a rank must send.
        self._sends: dict[str, float] = {
            "allreduce": 2 * others,
            "iallreduce": 2 * others,
            "broadcast": others,
            "reduce_scatter": others,
            "allgather": self.size - 1,
            "send": 1,
        }

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call and count its bytes and its duration."""
        nbytes = (
            self.traffic.count(self._sends[what] * args[0].nbytes) if what in self._sends else 0
        )
        name = STARTS.get(what, what)
        return self.traffic.reported(Kind.CALL, name, self.name, nbytes, call, *args)

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        """Start an operation whose request is timed as well."""
        request = self.called(what, call, *args)
        return _MeteredRequest(request, self.traffic, STARTS.get(what, what), self.name)

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Request:
        """Forward a round as a whole, as some communicators treat it as one operation."""
        nbytes = sum(self.traffic.count(array.nbytes) for array, _ in sends)
        call, arguments = self.inner._exchange, (sends, receives, tag)
        request = self.traffic.reported(Kind.CALL, "exchange", self.name, nbytes, call, *arguments)
        return _MeteredRequest(request, self.traffic, "exchange", self.name)

    def wrapped(self, group: Communicator) -> Communicator:
        """Count the calls of a group as well."""
        return Metered(group, self.traffic)
