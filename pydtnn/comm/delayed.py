"""A communicator with random delays, which reorders calls of ranks as on a busy cluster."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.request import Request
from pydtnn.comm.wrapper import Wrapper


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

    def pause(self) -> None:
        """Sleep for a random time, or only let other threads run."""
        time.sleep(max(0.0, self._random.uniform(-self.longest, self.longest)))

    def delays_completion(self) -> bool:
        """Whether `test` shall report a request as incomplete once more."""
        return self._random.random() < 0.5

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call with a pause before and after it."""
        self.pause()
        result = call(*args)
        self.pause()
        return result

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        """Start an operation whose completion is reported with a delay."""
        return _DelayedRequest(self, self.called(what, call, *args))


class _DelayedRequest(Request):
    def __init__(self, comm: Delayed, inner: Request) -> None:
        self._comm = comm
        self._inner = inner
        self._done = False

    @property
    def source(self) -> int:
        return self._inner.source

    def wait(self) -> None:
        self._comm.called("wait", self._inner.wait)
        self._done = True

    def test(self) -> bool:
        if not self._done:
            self._comm.pause()
            self._done = not self._comm.delays_completion() and self._inner.test()
        return self._done
