"""A communicator that keeps count of another: messages, bytes and seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator, Request


@dataclass
class Traffic:
    """What a rank has said and how long it was kept.

    Attributes
    ----------
    messages : int
        Calls that moved arrays.
    bytes : int
        Size of the arrays given to those calls, in B.
    seconds : float
        Time spent inside communication calls, in s: what was not hidden behind computation.
    """

    messages: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def count(self, array: np.ndarray) -> None:
        """Count one message."""
        self.messages += 1
        self.bytes += array.nbytes

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


class Metered(Communicator):
    """Hand every call over to another communicator and count it in `traffic`.

    Groups that are split off count there, too.

    Parameters
    ----------
    inner : Communicator
    traffic : Traffic, optional
        Counters to add to; new ones by default.
    """

    def __init__(self, inner: Communicator, traffic: Traffic | None = None) -> None:
        super().__init__(inner.rank, inner.hosts)
        self.inner = inner
        self.traffic = traffic or Traffic()

    def barrier(self) -> None:
        self.traffic.timed(self.inner.barrier)

    def gather_object(self, value: Any) -> list[Any]:
        return list(self.traffic.timed(self.inner.gather_object, value))

    def abort(self, code: int) -> None:
        self.inner.abort(code)

    def _call(self, call: Callable[..., Any], array: np.ndarray, *args: Any) -> Any:
        self.traffic.count(array)
        return self.traffic.timed(call, array, *args)

    def _start(self, call: Callable[..., Request], array: np.ndarray, *args: Any) -> Request:
        return _MeteredRequest(self._call(call, array, *args), self.traffic)

    def _allreduce(self, array: np.ndarray, op: str) -> None:
        self._call(self.inner._allreduce, array, op)

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        return self._start(self.inner._iallreduce, array, op)

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        self._call(self.inner._broadcast, array, root)

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        self._call(self.inner._reduce_scatter, array, counts, out)

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        self._call(self.inner._allgather, array, counts, out)

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        return self._start(self.inner._isend, array, to, tag)

    def _irecv(self, array: np.ndarray, source: int, tag: int) -> Request:
        return self._start(self.inner._irecv, array, source, tag)

    def _split(self, color: int, key: int) -> Communicator:
        return Metered(self.inner._split(color, key), self.traffic)
