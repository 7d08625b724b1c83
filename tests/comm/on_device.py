"""A communicator for tests that take NumPy arrays, which hands another one arrays of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pydtnn.comm import Communicator, Request
from pydtnn.comm.checks import overlap
from pydtnn.comm.communicator import Message
from pydtnn.comm.wrapper import Wrapper


class OnDevice(Wrapper):
    """Copy arrays to the device before a call, and back when it is complete.

    So the contract of all communicators holds those of devices to the same words.

    Parameters
    ----------
    inner : Communicator
        Which takes device arrays.
    xp : module
        CuPy, or what behaves like it.
    """

    def __init__(self, inner: Communicator, xp: Any) -> None:
        super().__init__(inner)
        self.xp = xp

    def wrapped(self, group: Communicator) -> Communicator:
        return OnDevice(group, self.xp)

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        copy = self.xp.asarray(array)
        return _Fetching(self.inner.iallreduce(copy, op), lambda: _fetch(copy, array))

    def _allreduce(self, array: np.ndarray, op: str) -> None:
        copy = self.xp.asarray(array)
        self.inner.allreduce(copy, op)
        _fetch(copy, array)

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        copy = self.xp.asarray(array)
        self.inner.broadcast(copy, root)
        _fetch(copy, array)

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        given, result = self.xp.asarray(array), self.xp.asarray(out)
        self.inner.reduce_scatter(given, counts, result)
        _fetch(result, out)

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        result, begin = self.xp.asarray(out), sum(counts[: self.rank])
        if overlap(array, out):
            given = result[begin : begin + counts[self.rank]]
        else:
            given = self.xp.asarray(array)
        self.inner.allgather(given, counts, result)
        _fetch(result, out)

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        return self.inner.isend(self.xp.asarray(array), to, tag)

    def _irecv(self, array: np.ndarray, source: int | None, tag: int) -> Request:
        copy = self.xp.asarray(array)
        return _Fetching(self.inner.irecv(copy, source, tag), lambda: _fetch(copy, array))

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Request:
        copies = [self.xp.asarray(array) for array, _ in receives]
        request = self.inner.exchange(
            [(self.xp.asarray(array), to) for array, to in sends],
            [(copy, source) for copy, (_, source) in zip(copies, receives, strict=True)],
            tag,
        )

        def fetch() -> None:
            for copy, (array, _) in zip(copies, receives, strict=True):
                _fetch(copy, array)

        return _Fetching(request, fetch)


class Aware(Wrapper):
    """Stands for an MPI that takes arrays of the simulated device.

    It knows no streams: it reads and writes their memory, as it is when it is called.
    """

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        return call(*(getattr(arg, "memory", arg) for arg in args))

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        return _Keeping(self.called(what, call, *args), args)


class _Keeping(Request):
    """A request that keeps its arrays alive, as those of mpi4py do."""

    def __init__(self, inner: Request, arrays: object) -> None:
        self.inner, self.arrays = inner, arrays

    @property
    def source(self) -> int:
        return self.inner.source

    def wait(self) -> None:
        self.inner.wait()

    def test(self) -> bool:
        return self.inner.test()


class _Fetching(Request):
    """A request after which the result is copied back, once."""

    def __init__(self, inner: Request, fetch: Callable[[], None]) -> None:
        self.inner, self.fetch = inner, fetch
        self.fetched = False

    @property
    def source(self) -> int:
        return self.inner.source

    def wait(self) -> None:
        self.inner.wait()
        self._finish()

    def test(self) -> bool:
        if not self.fetched and self.inner.test():
            self._finish()
        return self.fetched

    def _finish(self) -> None:
        if not self.fetched:
            self.fetched = True
            self.fetch()


def _fetch(copy: Any, array: np.ndarray) -> None:
    array[...] = copy.get()
