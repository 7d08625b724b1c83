"""Base class of communicators that wrap another one to count, delay or check its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.request import Request
from pydtnn.comm.supervision import Supervision
from pydtnn.utils.observer import Observer


class Wrapper(Communicator):
    """Forward every call to another communicator, through three methods to override.

    The messages of `exchange` are forwarded one by one.

    Parameters
    ----------
    inner : Communicator
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.hosts)
        self.inner = inner
        self.members, self.name = inner.members, inner.name
        self.capturable = inner.capturable
        self._frees_inner = False

    @property
    def supervision(self) -> Supervision | None:
        return self.inner.supervision

    @property
    def own_observer(self) -> Observer | None:
        return self.inner.own_observer

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a blocking call."""
        return call(*args)

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        """Make a call that returns a request."""
        return call(*args)

    def wrapped(self, group: Communicator) -> Communicator:
        """Wrap a group that was split off."""
        return type(self)(group)

    def _take_ownership(self) -> None:
        self._frees_inner = True
        self.inner._take_ownership()

    def _free(self) -> None:
        """Free the inner communicator if it was split off together with this one."""
        if self._frees_inner:
            self.inner.free()

    def barrier(self) -> None:
        self.called("barrier", self.inner.barrier)

    def gather_object(self, value: Any) -> list[Any]:
        return list(self.called("gather_object", self.inner.gather_object, value))

    def observe(self, observer: Observer | None) -> None:
        self.inner.observe(observer)

    def share(self, make: Callable[[], Any]) -> Any:
        return self.inner.share(make)

    def follow(
        self, algorithm: Any, array: np.ndarray, chunk_bytes: int, active: int
    ) -> Request | None:
        return self.inner.follow(algorithm, array, chunk_bytes, active)

    def pause(self) -> None:
        self.inner.pause()

    def adds(self, nbytes: int) -> None:
        self.inner.adds(nbytes)

    def abort(self, code: int) -> None:
        self.inner.abort(code)

    def _allreduce(self, array: np.ndarray, op: str) -> None:
        self.called("allreduce", self.inner._allreduce, array, op)

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        return self.started("iallreduce", self.inner._iallreduce, array, op)

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        self.called("broadcast", self.inner._broadcast, array, root)

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        self.called("reduce_scatter", self.inner._reduce_scatter, array, counts, out)

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        self.called("allgather", self.inner._allgather, array, counts, out)

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        return self.started("send", self.inner._isend, array, to, tag)

    def _irecv(self, array: np.ndarray, source: int | None, tag: int) -> Request:
        return self.started("recv", self.inner._irecv, array, source, tag)

    def _split(self, color: int, key: int) -> Communicator:
        return self.wrapped(self.called("split", self.inner._split, color, key))


class Driving(Request):
    """A request of the communicator inside: who waits for it or tests it drives others, too.

    Parameters
    ----------
    request : Request
    drive : callable
        Takes the request, and moves others until it is complete, or they are.
    advance : callable
        Moves others as far as they can.
    """

    def __init__(
        self, request: Request, drive: Callable[[Request], None], advance: Callable[[], None]
    ) -> None:
        self._request, self._drive, self._advance = request, drive, advance

    @property
    def source(self) -> int:
        return self._request.source

    def wait(self) -> None:
        self._drive(self._request)
        self._request.wait()

    def test(self) -> bool:
        self._advance()
        return self._request.test()
