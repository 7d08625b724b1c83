"""A communicator that holds its user to the rules of requests, and knows what is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator, Request
from pydtnn.comm.wrapper import Wrapper


class Injected(RuntimeError):
    """The error of a rank that is made to fail."""


@dataclass
class Ledger:
    """What one rank has called, on all of its groups.

    Attributes
    ----------
    calls : list of str
        Every call so far, in order.
    doing : str
        The call that the rank is in; empty where it is in none.
    under_way : list of WatchedRequest
        Operations whose end the rank has not seen yet, by `wait` or `test`.
    fails_at : int
        The call, counted from 0, that raises `Injected`; -1 for none.
    filler : int
        Every byte of an array that an operation under way will change. With 255 floats are NaN,
        which spreads; with 63 they are small numbers, which any write there changes.
    """

    calls: list[str] = field(default_factory=list)
    doing: str = ""
    under_way: list[WatchedRequest] = field(default_factory=list)
    fails_at: int = -1
    filler: int = 255

    def begin(self, what: str, args: tuple[Any, ...]) -> None:
        """Enter a call; its arrays must not be in use."""
        for array in (a for a in args if isinstance(a, np.ndarray)):
            for other in self.under_way:
                if other.keeps(array):
                    raise ValueError(
                        f"{what} uses an array of {other.what}, which is not complete; wait for "
                        "that request first"
                    )
        self.calls.append(what)
        if len(self.calls) - 1 == self.fails_at:
            raise Injected(f"injected failure in {what}")

    def where(self) -> str:
        """Tell which call the rank is in."""
        return f"in {self.doing}" if self.doing else "in no call"

    def inside(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call, known as what the rank is doing."""
        self.doing = what
        result = call(*args)
        self.doing = ""
        return result


class Watched(Wrapper):
    """Note every call in a ledger, and make misuse of arrays show always, not now and then.

    While an operation is under way that will change an array, it works on a copy, and the user's
    array holds the ledger's filler.

    Parameters
    ----------
    inner : Communicator
    ledger : Ledger
    """

    def __init__(self, inner: Communicator, ledger: Ledger) -> None:
        super().__init__(inner)
        self.ledger = ledger

    def wrapped(self, group: Communicator) -> Communicator:
        """Wrap a group that was split off; its calls go to the same ledger."""
        return Watched(group, self.ledger)

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call that returns when it is done."""
        self.ledger.begin(told := _told(what, args), args)
        return self.ledger.inside(told, call, *args)

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        """Make a call that returns a request."""
        self.ledger.begin(told := _told(what, args), args)
        array, *more = args
        copy = array.copy()
        if what != "send":
            _bytes(array)[:] = self.ledger.filler
        inner = self.ledger.inside(told, call, copy, *more)
        return WatchedRequest(inner, told, self.ledger, array, copy, what != "send")


@dataclass(eq=False)
class WatchedRequest(Request):
    """An operation on a copy of the user's array."""

    inner: Request
    what: str
    _ledger: Ledger
    _array: np.ndarray
    _copy: np.ndarray
    _changes: bool

    def __post_init__(self) -> None:
        self._ledger.under_way.append(self)

    def keeps(self, array: np.ndarray) -> bool:
        """Whether this array may not be used elsewhere yet."""
        return self._changes and np.may_share_memory(array, self._array)

    def wait(self) -> None:
        self._ledger.inside(self.what, self.inner.wait)
        self._complete()

    def test(self) -> bool:
        self._ledger.doing = self.what
        if not self.inner.test():
            return False  # and the rank will ask again: it still does the same
        self._ledger.doing = ""
        self._complete()
        return True

    def _complete(self) -> None:
        if self not in self._ledger.under_way:
            return
        self._ledger.under_way.remove(self)
        expected = self._ledger.filler if self._changes else _bytes(self._copy)
        if not (_bytes(self._array) == expected).all():
            raise ValueError(
                f"the array of {self.what} was modified before the request was complete; wait for "
                "the request first"
            )
        self._array[:] = self._copy


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)


def _told(what: str, args: tuple[Any, ...]) -> str:
    """Describe a call: "send of 12 float64 to rank 1 (tag 0)"."""
    arrays = [arg for arg in args if isinstance(arg, np.ndarray)]
    told = what + "".join(f" of {array.size} {array.dtype}" for array in arrays[:1])
    if what in ("send", "recv"):
        told += f" {'to' if what == 'send' else 'from'} rank {args[1]} (tag {args[2]})"
    return told
