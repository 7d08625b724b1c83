"""Reports of messages between ranks to an observer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydtnn.comm.request import Request
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
