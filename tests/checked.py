"""A communicator that compares the collective calls of all ranks before it makes them.

Over MPI, an allreduce of 5 elements on one rank and of 6 on another may deadlock, give wrong
results or write out of bounds. Here every collective call is described in a sentence: operation,
length, type, reduction, root. Each rank sends a hash of its sentence; where the hashes differ,
the sentences are compared, and every rank raises the same error.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.wrapper import Driving, Wrapper
from pydtnn.utils import clock
from pydtnn.utils.collective import call_difference
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.request import Request


class Checked(Wrapper):
    """Compare every collective call over the ranks, then forward it to another communicator.

    Intended for debugging: each call needs one additional small reduction. Lengths of
    point-to-point messages are compared by every communicator.

    A non-blocking call starts when the hashes of all ranks have arrived, and calls start in the
    order in which they were made. Hence waiting also starts the calls that were made before.

    Parameters
    ----------
    inner : Communicator
        The communicator to check. Collective: all ranks construct one.

    Raises
    ------
    AgreedError
        By the calls, or by the `wait` or `test` of their requests: on all ranks, if the calls of
        the ranks differ.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.capturable = False
        # Separate from the user's calls and from each other: when ranks detect a difference they
        # have made different numbers of later calls.
        self._carrier, self._explains = inner.split(0), inner.split(0)
        self._pending: deque[_Pending] = deque()
        # Those of this group and the groups split off from it that have calls not yet started.
        self._busy: dict[Checked, None] = {}

    def wrapped(self, group: Communicator) -> Communicator:
        checked = Checked(group)
        checked._busy = self._busy
        return checked

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        pending = self._compare(what, lambda: None, args, self.traffic.within)
        pending.start_in_turn()
        return call(*args)

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        if what in ("send", "recv"):
            return Driving(call(*args), self.drive, self.start_ready)
        # Without the method: a call that follows another one starts when that is complete.
        return self._compare(what, lambda: call(*args), args)

    def start_ready(self) -> None:
        """Start the calls that all ranks have made, in order within each group."""
        for comm in list(self._busy):
            while comm._pending and comm._pending[0].is_compared():
                comm.start_oldest()

    def start_oldest(self) -> None:
        """Start the oldest call of this group, once all ranks have made it."""
        pending = self._pending.popleft()
        if not self._pending:
            del self._busy[self]
        pending.start()

    def drive(self, request: Request) -> None:
        """Start calls that all ranks have made until a request is complete or no call is left."""
        while self._busy and not request.test():
            self.start_ready()
            clock.current().pause()

    @property
    def is_alone(self) -> bool:
        """Whether no other group has calls that some ranks have not made yet."""
        return not self._busy or [*self._busy] == [self]

    def _compare(
        self, what: str, start: Callable[[], Request | None], args: tuple[Any, ...], place: str = ""
    ) -> _Pending:
        pending = _Pending(self, f"{_sentence(what, args)}{place}", start)
        self._pending.append(pending)
        self._busy[self] = None
        self.start_ready()
        return pending

    def _free(self) -> None:
        self._compare("free", lambda: None, ()).start_in_turn()
        self._carrier.free()
        self._explains.free()
        super()._free()


class _Pending(Request):
    """A collective call, which is first compared, then started, then completed."""

    def __init__(self, comm: Checked, sentence: str, start: Callable[[], Request | None]) -> None:
        self._comm = comm
        self._sentence = sentence
        self._start = start
        self._request: Request | None = None
        digest = hashlib.blake2b(sentence.encode(), digest_size=16).digest()
        own = np.frombuffer(digest, np.int32)
        # Maximum and, negated, minimum over all ranks; in 64 bits no negation overflows.
        self._numbers = np.concatenate([own, -own.astype("int64")])
        self._compared = comm._carrier._iallreduce(self._numbers, "max")
        self._started = False

    def is_compared(self) -> bool:
        return self._compared.test()

    def start(self) -> None:
        """Start the call, which must be the oldest one."""
        self._compared.wait()
        self._started = True
        greatest, least = np.split(self._numbers, 2)
        if (greatest != -least).any():
            raise AgreedError(call_difference(self._comm._explains._gather_object(self._sentence)))
        self._request = self._start()

    def start_in_turn(self) -> None:
        """Start this call and all calls made before it."""
        while not self._started:
            if self._comm.is_alone:
                self._comm.start_oldest()
            else:
                self._comm.start_ready()
                clock.current().pause()

    def wait(self) -> None:
        self.start_in_turn()
        if self._request is not None:
            self._comm.drive(self._request)
            self._request.wait()

    def test(self) -> bool:
        self._comm.start_ready()
        return self._started and (self._request is None or self._request.test())


def _sentence(what: str, args: tuple[Any, ...]) -> str:
    """Describe a call by all that must be equal on all ranks: "allreduce sum of 5 float32"."""
    if what in ("allreduce", "iallreduce"):
        array, op = args
        return f"{what} {op} of {_what(array)}"
    if what == "broadcast":
        array, root = args
        return f"broadcast of {_what(array)} from rank {root}"
    if what in ("reduce_scatter", "allgather"):
        array, counts, _ = args
        return f"{what} of {sum(counts)} {array.dtype.name} by {list(counts)}"
    return what


def _what(array: Any) -> str:
    return f"{array.size} {array.dtype.name}"
