"""Messages between ranks of one process: sends meet receives in the order of their posting."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np


@dataclass
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
    """

    array: np.ndarray
    done: bool = False
    problem: str = ""


class Mailbox:
    """Matches messages by key, such as (source, destination, tag), first come first served.

    A message is copied once, straight from the sender's array into the receiver's, as soon as both
    sides are there. The mailbox knows nothing of threads: whoever shares it locks it.
    """

    def __init__(self) -> None:
        self._sends: defaultdict[Hashable, deque[Message]] = defaultdict(deque)
        self._receives: defaultdict[Hashable, deque[Message]] = defaultdict(deque)

    def send(self, key: Hashable, array: np.ndarray) -> Message:
        """Post an array to be sent; `done` once a receive has taken it."""
        message = Message(array)
        if self._receives[key]:
            _deliver(message, self._receives[key].popleft())
        else:
            self._sends[key].append(message)
        return message

    def receive(self, key: Hashable, array: np.ndarray) -> Message:
        """Post an array to be filled; `done` once a send has filled it."""
        message = Message(array)
        if self._sends[key]:
            _deliver(self._sends[key].popleft(), message)
        else:
            self._receives[key].append(message)
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
