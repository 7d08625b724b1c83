"""Messages between ranks of one process: sends meet receives in the order of their posting."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Message:
    """One side of a message: the array to send, or the array to fill.

    Attributes
    ----------
    array : ndarray (n,)
        Where the values are read from, or written to.
    done : bool
        Whether the message has been copied (or refused).
    problem : str
        Why the receiver refuses it; empty where it fits.
    met : Message or None
        The other side, if it was there already.
    waiting : list
        Data of the owner of the mailbox: what waits for this side.
    """

    array: np.ndarray
    done: bool = False
    problem: str = ""
    met: Message | None = None
    waiting: list[Any] = field(default_factory=list)


class Mailbox:
    """Matches messages by key, such as (source, destination, tag), first come first served.

    A message is copied once, straight from the sender's array into the receiver's, as soon as both
    sides are there. The mailbox does not lock: callers that share it do.
    """

    def __init__(self) -> None:
        # Queues of what waits for its other side; a key that nothing waits at has none.
        self._sends: dict[Hashable, deque[Message]] = {}
        self._receives: dict[Hashable, deque[Message]] = {}

    def send(self, key: Hashable, array: np.ndarray) -> Message:
        """Post an array to be sent; `done` once a receive has taken it."""
        message = Message(array)
        message.met = _take(self._receives, key)
        if message.met is None:
            self._sends.setdefault(key, deque()).append(message)
        else:
            _deliver(message, message.met)
        return message

    def receive(self, key: Hashable, array: np.ndarray) -> Message:
        """Post an array to be filled; `done` once a send has filled it."""
        message = Message(array)
        message.met = _take(self._sends, key)
        if message.met is None:
            self._receives.setdefault(key, deque()).append(message)
        else:
            _deliver(message.met, message)
        return message


def _take(queues: dict[Hashable, deque[Message]], key: Hashable) -> Message | None:
    """Take the first message of a queue, and the queue with its last one."""
    queue = queues.get(key)
    if queue is None:
        return None
    message = queue.popleft()
    if not queue:
        del queues[key]
    return message


def wrong_length(expected: int, given: int | None) -> str:
    """Say that a message does not fill the receiver's array; lengths in bytes, None: too long."""
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
