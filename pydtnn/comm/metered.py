"""A communicator that keeps count of another: messages, bytes and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydtnn.comm.communicator import Communicator, Message, Request
from pydtnn.comm.wrapper import Wrapper


@dataclass
class Traffic:
    """What a rank has said and how long it was kept.

    Attributes
    ----------
    messages : int
        Collective calls with arrays, and messages sent.
    bytes : int
        What this rank must send for them, in B: of a collective, by the algorithm that sends least.
    seconds : float
        Time spent inside communication calls, in s: what was not hidden behind computation.
    """

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def count(self, sent: float) -> None:
        """Count one call that sends so many bytes."""
        self.messages += 1
        self.bytes += round(sent)

    @contextmanager
    def apart(self) -> Iterator[Traffic]:
        """Count the messages that are said inside apart, in what is yielded; time counts as ever.

        So a step that is captured in a CUDA graph is known by its own messages, and those of each
        replay, which makes no calls, can be added by `repeat`.
        """
        before, part = (self.messages, self.bytes), Traffic()
        try:
            yield part
        finally:
            part.messages, part.bytes = self.messages - before[0], self.bytes - before[1]
            self.messages, self.bytes = before

    def repeat(self, part: Traffic) -> None:
        """Count once more the messages that were counted apart."""
        self.messages += part.messages
        self.bytes += part.bytes

    def timed(self, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call and add the time it took."""
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds += time.perf_counter() - start


class _MeteredRequest(Request):
    def __init__(self, inner: Request, traffic: Traffic) -> None:
        self.inner = inner
        self.traffic = traffic

    def wait(self) -> None:
        self.traffic.timed(self.inner.wait)

    def test(self) -> bool:
        return bool(self.traffic.timed(self.inner.test))


class Metered(Wrapper):
    """Hand every call over to another communicator and count it in `traffic`.

    Groups that are split off count there, too.

    Parameters
    ----------
    inner : Communicator
    traffic : Traffic, optional
        Counters to add to; new ones by default.
    """

    def __init__(self, inner: Communicator, traffic: Traffic | None = None) -> None:
        super().__init__(inner)
        self.traffic = traffic or Traffic()
        others = (self.size - 1) / self.size
        # How often a rank must send the array it is called with.
        self._sends: dict[str, float] = {
            "allreduce": 2 * others,
            "iallreduce": 2 * others,
            "broadcast": others,
            "reduce_scatter": others,
            "allgather": self.size - 1,
            "send": 1,
        }

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call, count what it sends and the time it takes."""
        if what in self._sends:
            self.traffic.count(self._sends[what] * args[0].nbytes)
        return self.traffic.timed(call, *args)

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        """Start what takes time later on, too."""
        return _MeteredRequest(self.called(what, call, *args), self.traffic)

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Request:
        """Hand a round over as a whole: to some it is one operation."""
        for array, _ in sends:
            self.traffic.count(array.nbytes)
        return self.started("exchange", self.inner._exchange, sends, receives, tag)

    def wrapped(self, group: Communicator) -> Communicator:
        """Count what a group says, too."""
        return Metered(group, self.traffic)
