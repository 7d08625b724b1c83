"""Messages between virtual ranks: they are matched in posting order, and take time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from pydtnn.comm.mailbox import wrong_length
from pydtnn.perfmodel.engine.engine import Completion, Engine
from pydtnn.perfmodel.engine.processor import Processor

Key = tuple[int, int, int]
"""Sender, receiver and tag."""


@dataclass(slots=True)
class _Side:
    """One side of a message."""

    array: np.ndarray
    done: Completion


class PostOffice:
    """Matches the messages of a group, first in, first out, and lets them pass the network.

    A message starts when both sides are posted; after the latency its bytes flow.

    Parameters
    ----------
    engine : Engine
    members : sequence of int
        The ranks of the group, numbered among all ranks of the run.
    processor : Processor
    """

    def __init__(self, engine: Engine, members: Sequence[int], processor: Processor) -> None:
        self._engine, self._members, self._processor = engine, members, processor
        self._hosts: list[Hashable] = [engine.network.hosts[rank] for rank in members]
        self._sends: dict[Key, deque[_Side]] = {}
        self._receives: dict[Key, deque[_Side]] = {}

    def send(self, sender: int, receiver: int, tag: int, array: np.ndarray) -> Completion:
        """Post an array to send, at the present time of the sender."""
        side = _Side(array, Completion(self._members[sender]))
        key = sender, receiver, tag

        def match() -> None:
            other = _take(self._receives, key)
            if other is None:
                self._sends.setdefault(key, deque()).append(side)
            else:
                self._deliver(key, side, other)

        self._engine.spend(side.done.owner, self._processor.copy * array.nbytes)
        self._post(side, match)
        return side.done

    def receive(self, sender: int, receiver: int, tag: int, array: np.ndarray) -> Completion:
        """Post an array to receive into, at the present time of the receiver."""
        side = _Side(array, Completion(self._members[receiver]))
        key = sender, receiver, tag

        def match() -> None:
            other = _take(self._sends, key)
            if other is None:
                self._receives.setdefault(key, deque()).append(side)
            else:
                self._deliver(key, other, side)

        self._post(side, match)
        return side.done

    def take(self, receiver: int, array: np.ndarray) -> None:
        """Let a rank copy an array that has arrived."""
        self._engine.spend(self._members[receiver], self._processor.copy * array.nbytes)

    def _post(self, side: _Side, match: Callable[[], None]) -> None:
        self._engine.spend(side.done.owner, self._processor.call)
        self._engine.post(side.done.owner, match)

    def _deliver(self, key: Key, send: _Side, receive: _Side) -> None:
        engine = self._engine
        if send.array.nbytes != receive.array.nbytes:
            receive.done.problem = wrong_length(receive.array.nbytes, send.array.nbytes)
            engine.complete(send.done, engine.now)
            engine.complete(receive.done, engine.now)
            return
        # Both ranks leave their arrays alone until the message is complete, so it is copied here.
        receive.array.view(np.uint8)[:] = send.array.view(np.uint8)

        def arrived() -> None:
            engine.complete(send.done, engine.now)
            engine.complete(receive.done, engine.now)

        pair = self._hosts[key[0]], self._hosts[key[1]]
        engine.transfer(pair, send.array.nbytes, arrived)


def _take(queues: dict[Key, deque[_Side]], key: Key) -> _Side | None:
    """Remove and return the first side of a queue; remove the queue if it is empty then."""
    queue = queues.get(key)
    if queue is None:
        return None
    side = queue.popleft()
    if not queue:
        del queues[key]
    return side
