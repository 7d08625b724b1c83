"""The clock that the parts of a run read: the time of this machine, or that of a virtual rank.

Whatever is reported about a run reads this clock. Watchdogs and the timing of kernels, which
concern the real machine, read the time themselves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

VIRTUAL_SECONDS = "virtual_seconds"
"""Entry of logs: the time of the training of virtual ranks."""


class Clock:
    """The performance counter of this machine.

    Attributes
    ----------
    common : bool
        Whether all ranks of the run read the same time.
    """

    common = False

    def now_ns(self) -> int:
        """Return the time since an arbitrary origin, in ns."""
        return time.perf_counter_ns()

    def pause(self) -> None:
        """Let others run, in a loop that tests requests until one of them is complete."""
        time.sleep(0)  # ranks may be threads of one process

    def add(self, nbytes: int) -> None:
        """Called when received values are added outside of a communicator, in B."""


MACHINE = Clock()
"""The clock of all threads but those of virtual ranks."""

_VIRTUAL: ContextVar[Clock | None] = ContextVar("clock of a virtual rank", default=None)
"""Set by `use` in the threads of virtual ranks only."""


def use(clock: Clock) -> None:
    """Let the calling thread read a clock from now on."""
    _VIRTUAL.set(clock)


@contextmanager
def used(clock: Clock) -> Iterator[None]:
    """Context in which the calling thread reads a clock."""
    token = _VIRTUAL.set(clock)
    try:
        yield
    finally:
        _VIRTUAL.reset(token)


def current() -> Clock:
    """Return the clock of the calling thread."""
    return _VIRTUAL.get() or MACHINE


def virtual() -> Clock | None:
    """Return the clock of the calling thread if it is that of a virtual rank."""
    return _VIRTUAL.get()


def now_ns() -> int:
    """Return the time of the calling thread's clock, in ns."""
    clock = _VIRTUAL.get()
    return time.perf_counter_ns() if clock is None else clock.now_ns()


def now() -> float:
    """Return the time of the calling thread's clock, in s."""
    clock = _VIRTUAL.get()
    return time.perf_counter() if clock is None else clock.now_ns() * 1e-9
