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

    def _call(self, times: float, call: Callable[..., Any], array: np.ndarray, *args: Any) -> Any:
        """Make a call that sends the array so many times."""
        self.traffic.count(times * array.nbytes)
        return self.traffic.timed(call, array, *args)

    def _start(
        self, times: float, call: Callable[..., Request], array: np.ndarray, *args: Any
    ) -> Request:
        return _MeteredRequest(self._call(times, call, array, *args), self.traffic)

    @property
    def _others(self) -> float:
        """The share of a whole that belongs to the other ranks."""
        return (self.size - 1) / self.size

    def _allreduce(self, array: np.ndarray, op: str) -> None:
        self._call(2 * self._others, self.inner._allreduce, array, op)

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        return self._start(2 * self._others, self.inner._iallreduce, array, op)

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        self._call(self._others, self.inner._broadcast, array, root)

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        self._call(self._others, self.inner._reduce_scatter, array, counts, out)

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        self._call(self.size - 1, self.inner._allgather, array, counts, out)

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        return self._start(1, self.inner._isend, array, to, tag)

    def _irecv(self, array: np.ndarray, source: int, tag: int) -> Request:
        request = self.traffic.timed(self.inner._irecv, array, source, tag)
        return _MeteredRequest(request, self.traffic)

    def _split(self, color: int, key: int) -> Communicator:
        return Metered(self.inner._split(color, key), self.traffic)
