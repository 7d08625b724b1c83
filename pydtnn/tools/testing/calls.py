"""A communicator that records its calls and checks the use of arrays in pending requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.wrapper import Wrapper
from pydtnn.utils.observer import Kind, Observer
from pydtnn.utils.request import Forwarding, Request


class Injected(RuntimeError):
    """An injected error."""


@dataclass
class CallLog(Observer):
    """Calls of one rank on all of its groups, and the layer or phase that it computes.

    Attributes
    ----------
    calls : list of str
        All calls so far, in order.
    doing : str
        The current call of the rank, or an empty string.
    at : str
        The layer or phase of training that began last.
    pending : list of RecordedRequest
        Operations that have not completed in `wait` or `test`.
    fails_at : int
        The call, counted from 0, that raises `Injected`; -1 for none.
    filler : int
        Value of every byte of an array that a pending operation will change. With 255 floats are
        NaN, which propagates; with 63 they are small numbers, so that modifications are detected.
    """

    calls: list[str] = field(default_factory=list)
    doing: str = ""
    at: str = "the construction of the model"
    pending: list[RecordedRequest] = field(default_factory=list)
    fails_at: int = -1
    filler: int = 255

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        if kind in (Kind.PHASE, Kind.FORWARD, Kind.BACKWARD):
            self.at = name

    def add(self, what: str, args: tuple[Any, ...]) -> None:
        """Record a call; its arrays must not be in use."""
        for array in (a for a in args if isinstance(a, np.ndarray)):
            for other in self.pending:
                if other.keeps(array):
                    raise ValueError(
                        f"{what} uses an array of {other.what}, which is not complete; wait for "
                        "that request first"
                    )
        self.calls.append(what)
        if len(self.calls) - 1 == self.fails_at:
            raise Injected(f"injected failure in {what}")

    def where(self) -> str:
        """Return what the rank computes, and its current call."""
        return f"at {self.at}" + (f" in {self.doing}" if self.doing else "")

    def inside(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Run a call and record it as the current one."""
        self.doing = what
        result = call(*args)
        self.doing = ""
        return result


class CallRecorder(Wrapper):
    """Record every call in a log, and detect incorrect use of arrays deterministically.

    While an operation that changes an array is pending, it uses a copy, and the user's array
    contains the log's filler.

    Parameters
    ----------
    inner : Communicator
    log : CallLog
    """

    def __init__(self, inner: Communicator, log: CallLog) -> None:
        super().__init__(inner)
        self.log = log

    def wrapped(self, group: Communicator) -> Communicator:
        """Wrap a group created by `split`; its calls are recorded in the same log."""
        return CallRecorder(group, self.log)

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Run a blocking call."""
        self.log.add(call_name := _describe(what, args), args)
        return self.log.inside(call_name, call, *args)

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        """Run a call that returns a request."""
        self.log.add(call_name := _describe(what, args), args)
        array, *more = args
        copy = array.copy()
        if what != "send":
            _bytes(array)[:] = self.log.filler
        inner = self.log.inside(call_name, call, copy, *more)
        return RecordedRequest(inner, call_name, self.log, array, copy, what != "send")


@dataclass(eq=False)
class RecordedRequest(Forwarding):
    """An operation on a copy of the user's array."""

    inner: Request
    what: str
    _log: CallLog
    _array: np.ndarray
    _copy: np.ndarray
    _changes: bool

    def __post_init__(self) -> None:
        self._log.pending.append(self)

    def keeps(self, array: np.ndarray) -> bool:
        """Return whether this array must not be used elsewhere yet."""
        return self._changes and np.may_share_memory(array, self._array)

    def wait(self) -> None:
        self._log.inside(self.what, self.inner.wait)
        self._complete()

    def test(self) -> bool:
        self._log.doing = self.what
        if not self.inner.test():
            return False  # the rank will test again: the current call does not change
        self._log.doing = ""
        self._complete()
        return True

    def _complete(self) -> None:
        if self not in self._log.pending:
            return
        self._log.pending.remove(self)
        expected = self._log.filler if self._changes else _bytes(self._copy)
        if not (_bytes(self._array) == expected).all():
            raise ValueError(
                f"the array of {self.what} was modified before the request was complete; wait for "
                "the request first"
            )
        self._array[:] = self._copy


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)


def _describe(what: str, args: tuple[Any, ...]) -> str:
    """Describe a call: "send of 12 float64 to rank 1 (tag 0)"."""
    arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
    description = what + "".join(f" of {array.size} {array.dtype}" for array in arrays[:1])
    if what in ("send", "recv"):
        peer = "any rank" if args[1] is None else f"rank {args[1]}"
        description += f" {'to' if what == 'send' else 'from'} {peer} (tag {args[2]})"
    return description
