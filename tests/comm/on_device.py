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

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        copies, fetch = self._copied(what, args)
        result = call(*copies)
        fetch()
        return result

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        copies, fetch = self._copied(what, args)
        return _Fetching(call(*copies), fetch)

    def _copied(self, what: str, args: tuple[Any, ...]) -> tuple[list[Any], Callable[[], None]]:
        """Return arguments with copies of the arrays, and what copies these back."""
        moves = what != "gather_object"
        copies = [
            self.xp.asarray(arg) if moves and isinstance(arg, np.ndarray) else arg for arg in args
        ]
        if what == "allgather" and overlap(args[0], args[2]):  # the part is in its place
            begin = sum(args[1][: self.rank])
            copies[0] = copies[2][begin : begin + args[1][self.rank]]

        def fetch() -> None:
            for copy, arg in zip(copies, args, strict=True):
                if copy is not arg and what != "send":
                    arg[...] = copy.get()

        return copies, fetch

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Request:
        copies = [self.xp.asarray(array) for array, _ in receives]
        request = self.inner.exchange(
            [(self.xp.asarray(array), to) for array, to in sends],
            [(copy, source) for copy, (_, source) in zip(copies, receives, strict=True)],
            tag,
        )

        def fetch() -> None:
            for copy, (array, _) in zip(copies, receives, strict=True):
                array[...] = copy.get()

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
