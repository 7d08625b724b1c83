"""What this rank is doing, in memory that the monitor process of its host reads."""

from __future__ import annotations

from pydtnn.comm.monitor.slots import (
    CALL,
    CALLING,
    DEEPEST,
    DEPTH,
    EPOCH,
    GROUP,
    LANE,
    LANES,
    MOST_LANES,
    MOVES,
    NUMBER,
    PEER,
    STACK,
    STEP,
    Slot,
    code,
)
from pydtnn.utils.observer import Kind, Observer


class CurrentActivity(Observer):
    """Stores the nested activities of the main thread, or of one other thread.

    A notification writes three words to memory and makes no system call.

    Parameters
    ----------
    slot : Slot
    moves, depth, first : int
        The words of the number of changes, of the number of nested activities, and of the first of
        them.
    most : int
        Number of activities that are stored.
    """

    def __init__(
        self,
        slot: Slot,
        moves: int = MOVES,
        depth: int = DEPTH,
        first: int = STACK,
        most: int = DEEPEST,
    ) -> None:
        self.slot = slot
        self._words = slot.words
        self._codes: dict[tuple[int, str, int], int] = {}
        self._moves, self._at, self._first, self._most = moves, depth, first, most
        self._depth = 0
        self._lanes: dict[str, Observer] = {}

    def lane(self, name: str) -> Observer:
        """Return the observer of another thread; without effect if there is no room for it."""
        if name not in self._lanes:
            place = len(self._lanes)
            if place == MOST_LANES:
                return Observer()
            first = LANES + LANE * place
            self._lanes[name] = CurrentActivity(
                self.slot, first + 1, first + 2, first + 3, LANE - 3
            )
            self._words[first] = self.slot.number(name)
        return self._lanes[name]

    def step(self, epoch: int, step: int) -> None:
        words = self._words
        words[EPOCH], words[STEP] = epoch, step
        words[self._moves] += 1

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        depth, words = self._depth, self._words
        if depth < self._most:
            key = kind, name, bucket
            word = self._codes.get(key)
            if word is None:
                word = self._codes[key] = code(kind, self.slot.number(name), bucket)
            words[self._first + depth] = word
        self._depth = words[self._at] = depth + 1
        words[self._moves] += 1

    def end(self) -> None:
        self._depth -= 1
        words = self._words
        words[self._at] = self._depth
        words[self._moves] += 1

    def call(self, name: str, group: str, number: int, peer: int) -> None:
        """Called when the main thread begins to wait in a call of a communicator.

        Parameters
        ----------
        name, group : str
        number : int
            Number of collective calls in the group, with this one; 0 for messages.
        peer : int
            The other rank of a message, among all ranks; -1 for collective calls.
        """
        words, slot = self._words, self.slot
        words[CALL], words[GROUP] = slot.number(name), slot.number(group)
        words[NUMBER], words[PEER] = number, peer
        words[CALLING] = 1
        words[MOVES] += 1

    def called(self) -> None:
        """Called when the wait ends."""
        self._words[CALLING] = 0
        self._words[MOVES] += 1
