"""Communicators that wrap another one: the base class, and one that delays calls."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.monitor.supervision import Supervision
from pydtnn.utils.request import Forwarding, Request


class Wrapper(Communicator):
    """Forward every call to another communicator, through three methods to override.

    The messages of `exchange` are forwarded one by one.

    Parameters
    ----------
    inner : Communicator
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.hosts, inner.traffic)
        self.inner = inner
        self.members, self.name, self.launched = inner.members, inner.name, inner.launched
        self.capturable, self.transport = inner.capturable, inner.transport
        self._frees_inner = False

    @property
    def supervision(self) -> Supervision | None:
        return self.inner.supervision

    def why_not_survived(self) -> str:
        return self.inner.why_not_survived()

    def lost_ranks(self) -> bool:
        return self.inner.lost_ranks()

    def all_remain(self) -> bool:
        return self.inner.all_remain()

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

    def _barrier(self) -> None:
        self.called("barrier", self.inner._barrier)

    def _gather_object(self, value: Any) -> list[Any]:
        return list(self.called("gather_object", self.inner._gather_object, value))

    def share(self, make: Callable[[], Any]) -> Any:
        return self.inner.share(make)

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


class Driving(Forwarding):
    """A request of the inner communicator whose waits and tests also advance others.

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
        super().__init__(request)
        self._drive, self._advance = drive, advance

    def wait(self) -> None:
        self._drive(self.inner)
        self.inner.wait()

    def test(self) -> bool:
        self._advance()
        return self.inner.test()


class Delayed(Wrapper):
    """Sleep before and after calls of another communicator, and report requests as incomplete.

    The result of a program must not depend on it: run with several seeds and compare the bytes.

    Parameters
    ----------
    inner : Communicator
    seed : int
        Seed of the delays; the delays of the ranks differ.
    longest : float
        Longest delay, in s. Half of the delays are zero.
    """

    def __init__(self, inner: Communicator, seed: int = 0, longest: float = 5e-4) -> None:
        super().__init__(inner)
        self.longest = longest
        self._random = random.Random(f"{seed} {inner.rank}")  # ranks may call it from any thread

    def wrapped(self, group: Communicator) -> Communicator:
        """Wrap a group that was split off, with different delays."""
        return Delayed(group, self._random.getrandbits(32), self.longest)

    def delay(self) -> None:
        """Sleep for a random time, or only let other threads run."""
        time.sleep(max(0.0, self._random.uniform(-self.longest, self.longest)))

    def delays_completion(self) -> bool:
        """Whether `test` shall report a request as incomplete once more."""
        return self._random.random() < 0.5

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call with a delay before and after it."""
        self.delay()
        result = call(*args)
        self.delay()
        return result

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        """Start an operation whose completion is reported with a delay."""
        return _DelayedRequest(self, self.called(what, call, *args))


class _DelayedRequest(Forwarding):
    def __init__(self, comm: Delayed, inner: Request) -> None:
        super().__init__(inner)
        self._comm, self._done = comm, False

    def wait(self) -> None:
        self._comm.called("wait", self.inner.wait)
        self._done = True

    def test(self) -> bool:
        if not self._done:
            self._comm.delay()
            self._done = not self._comm.delays_completion() and self.inner.test()
        return self._done
