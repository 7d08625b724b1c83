"""Messages between ranks of one process, which match sends and receives in posting order."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Message:
    """One side of a message: the array to send, or the array to receive into.

    Attributes
    ----------
    array : ndarray (n,)
        Source or destination of the values.
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
    done: bool = False
    problem: str = ""
    met: Message | None = None
    waiting: list[Any] = field(default_factory=list)


class Mailbox:
    """Matches messages by key, such as (source, destination, tag), first in, first out.

    A message is copied once, directly from the sender's array into the receiver's, as soon as both
    sides are posted. The mailbox is not thread-safe: callers that share it hold a lock.
    """

    def __init__(self) -> None:
        # Queues of the sides that are not matched yet; empty queues are removed.
        self._sends: dict[Hashable, deque[Message]] = {}
        self._receives: dict[Hashable, deque[Message]] = {}

    def send(self, key: Hashable, array: np.ndarray) -> Message:
        """Post an array to send; `done` once a receive has matched it."""
        message = Message(array)
        message.met = _take(self._receives, key)
        if message.met is None:
            self._sends.setdefault(key, deque()).append(message)
        else:
            _deliver(message, message.met)
        return message

    def receive(self, key: Hashable, array: np.ndarray) -> Message:
        """Post an array to receive into; `done` once a send has matched it."""
        message = Message(array)
        message.met = _take(self._sends, key)
        if message.met is None:
            self._receives.setdefault(key, deque()).append(message)
        else:
            _deliver(message.met, message)
        return message


def _take(queues: dict[Hashable, deque[Message]], key: Hashable) -> Message | None:
    """Remove and return the first message of a queue; remove the queue if it is empty then."""
    queue = queues.get(key)
    if queue is None:
        return None
    message = queue.popleft()
    if not queue:
        del queues[key]
    return message


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
    send.done = receive.done = True
