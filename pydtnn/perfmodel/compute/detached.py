"""A communicator whose operations can be completed at once, without the other ranks.

The compute time of one rank of several is measured without those of the others: after the groups of
a run have been created by all ranks, `Detachable.detached` lets one of them run steps alone. Its
messages have the lengths of real ones; received values are arbitrary, but finite and not subnormal,
so that kernels take their usual time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.wrapper import Wrapper
from pydtnn.utils.request import Completed, Request

SPREAD = 0.1
"""Standard deviation of received floats."""

WAIT = 50e-6
"""Time for which a detached rank polls when it waits, in s.

Ranks that poll between two layers compute differently from a rank that never waits: kernels of the
ranks of a host do not run at the same time, and find less in the caches. Measured with 2 ranks on 2
cores that share a host: without it, the layers of a ResNet-20 that is cut into stripes were 8 %
faster than in training.
"""


class Detachable(Wrapper):
    """Forward every call to another communicator, except within `detached`.

    Parameters
    ----------
    inner : Communicator
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self._state = _State()

    def wrapped(self, group: Communicator) -> Communicator:
        """Wrap a group, which is detached together with this one."""
        child = Detachable(group)
        child._state = self._state
        return child

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Context in which operations of this group and its relatives complete at once."""
        self._state.detached = True
        try:
            yield
        finally:
            self._state.detached = False

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a blocking call, or complete it without other ranks."""
        if not self._state.detached:
            return call(*args)
        if what == "split":
            raise ValueError(
                "Detachable: groups cannot be created while a rank is measured alone; create them "
                "when the exchange starts"
            )
        if what == "gather_object":
            return [args[0]] * self.size
        if what == "reduce_scatter":
            array, counts, out = args
            begin = sum(counts[: self.rank])
            out[:] = array[begin : begin + len(out)]
        if what == "allgather":
            self._gather(*args)
        return None

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        """Start an operation, or complete it without other ranks."""
        if not self._state.detached:
            return call(*args)
        if what == "recv":
            self._state.receive(args[0])
        if what == "send":
            self._state.send(args[0])
            return Completed()
        return _Polled()

    def _gather(self, array: np.ndarray, counts: Sequence[int], out: np.ndarray) -> None:
        """Use this rank's part for those of all ranks."""
        begin = 0
        for count in counts:
            part = out[begin : begin + count]
            part[:] = array if len(array) == count else np.resize(array, count)
            begin += count


class _Polled(Completed):
    """A completed operation for which a rank polls once."""

    def wait(self) -> None:
        end = time.perf_counter() + WAIT
        while time.perf_counter() < end:
            pass


class _State:
    """Whether groups are detached, and values to receive."""

    def __init__(self) -> None:
        self.detached = False
        self._random: dict[np.dtype, np.ndarray] = {}
        self._sent: dict[tuple[np.dtype, int], np.ndarray] = {}

    def send(self, array: np.ndarray) -> None:
        """Keep integers, which may be indices, for the next receive of such an array."""
        if not np.issubdtype(array.dtype, np.floating):
            self._sent[array.dtype, array.size] = array.copy()

    def receive(self, array: np.ndarray) -> None:
        """Fill an array with random floats, or with integers that were sent before."""
        if not np.issubdtype(array.dtype, np.floating):
            array[:] = self._sent.get((array.dtype, array.size), 0)
            return
        values = self._random.get(array.dtype)
        if values is None or len(values) < len(array):
            rng = np.random.default_rng(0)
            values = (SPREAD * rng.standard_normal(len(array))).astype(array.dtype)
            self._random[array.dtype] = values
        array[:] = values[: len(array)]
