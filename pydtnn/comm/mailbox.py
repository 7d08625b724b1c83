"""Messages between ranks of one process, which match sends and receives in posting order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

Side = TypeVar("Side")

Key = tuple[int | None, int, int]
"""Source, destination and tag."""


@dataclass(slots=True)
class Message:
    """One side of a message: the array to send, or the array to receive into.

    Attributes
    ----------
    array : ndarray (n,)
        Source or destination of the values.
    source : int or None
        The rank that sends; of a receive from any rank None until a send has matched it.
    done : bool
        Whether the message has been copied, or rejected.
    problem : str
        Why the receiver rejects the message; empty if the lengths match.
    met : Message or None
        The other side, if it was posted before.
    waiting : list
        Reserved for the owner of the mailbox: the threads that wait for this side.
    """

    array: np.ndarray
    source: int | None
    done: bool = False
    problem: str = ""
    met: Message | None = None
    waiting: list[Any] = field(default_factory=list)


class Matching(Generic[Side]):
    """Matches sends and receives, first in, first out, as MPI does.

    A receive takes the first message for its rank and with its tag from its source, or from any
    rank if that is None; a message is taken by the first receive that accepts it. It is not
    thread-safe: callers that share it hold a lock.
    """

    def __init__(self) -> None:
        # Sides that are not matched yet, with their turn, by source, destination and tag; empty
        # queues are removed.
        self._sends: dict[Key, deque[tuple[int, Side]]] = {}
        self._receives: dict[Key, deque[tuple[int, Side]]] = {}
        self._turns = 0

    def send(self, source: int, to: int, tag: int, side: Side) -> Side | None:
        """Return the receive that a message matches; otherwise keep the message."""
        key = source, to, tag
        found = [k for k in (key, (None, to, tag)) if k in self._receives]
        return self._match(self._receives, found, self._sends, key, side)

    def receive(self, source: int | None, to: int, tag: int, side: Side) -> Side | None:
        """Return the message that a receive matches; otherwise keep the receive."""
        key = source, to, tag
        found = [key] if key in self._sends else []
        if source is None:
            found = [k for k in self._sends if k[1:] == (to, tag)]
        return self._match(self._sends, found, self._receives, key, side)

    def _match(
        self,
        others: dict[Key, deque[tuple[int, Side]]],
        found: Sequence[Key],
        own: dict[Key, deque[tuple[int, Side]]],
        key: Key,
        side: Side,
    ) -> Side | None:
        """Remove and return the first side in the queues that were found, or keep this side."""
        if not found:
            self._turns += 1
            own.setdefault(key, deque()).append((self._turns, side))
            return None
        first = min(found, key=lambda key: others[key][0][0])
        _, other = others[first].popleft()
        if not others[first]:
            del others[first]
        return other


class Mailbox:
    """Messages between ranks that share memory.

    A message is copied once, directly from the sender's array into the receiver's, as soon as both
    sides are posted.
    """

    def __init__(self) -> None:
        self._matching: Matching[Message] = Matching()

    def send(self, source: int, to: int, tag: int, array: np.ndarray) -> Message:
        """Post an array to send; `done` once a receive has matched it."""
        message = Message(array, source)
        message.met = self._matching.send(source, to, tag, message)
        if message.met is not None:
            _deliver(message, message.met)
        return message

    def receive(self, source: int | None, to: int, tag: int, array: np.ndarray) -> Message:
        """Post an array to receive into; `done` once a send has matched it."""
        message = Message(array, source)
        message.met = self._matching.receive(source, to, tag, message)
        if message.met is not None:
            _deliver(message.met, message)
        return message


def name_source(source: int | None) -> str:
    """Return from whom a receive is, for an error."""
    return "any rank" if source is None else f"rank {source}"


def wrong_length(expected: int, given: int | None) -> str:
    """Error text for a message of wrong length; lengths in bytes, None: longer than expected."""
    return (
        f"recv: expected a message of {expected} bytes, got {'more' if given is None else given}; "
        "receive into an array of the type and length that is sent."
    )


def _deliver(send: Message, receive: Message) -> None:
    if send.array.nbytes == receive.array.nbytes:
        receive.array.view(np.uint8)[:] = send.array.view(np.uint8)
    else:
        receive.problem = wrong_length(receive.array.nbytes, send.array.nbytes)
    receive.source = send.source
    send.done = receive.done = True
