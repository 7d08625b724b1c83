"""What the engine of virtual time knows of each rank."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

FREE_TESTS = 64
"""Tests at the same time of a rank after which they are taken to be a loop that waits."""

POLL = 5e-6
"""Time of a test in such a loop, in s."""

MOST_LATER = 64
"""Completions that are noted before those of the past are forgotten."""


class Completion:
    """The end of something that ranks wait for.

    Attributes
    ----------
    at : float
        Its time in s; infinite until it is known.
    problem : str
        Why the operation has failed, if it has.
    owner : int
        The rank whose operation it is.
    source : int
        The rank, in its group, whose message has been received; -1 before, and without a message.
    """

    __slots__ = ("at", "owner", "problem", "source", "waits")

    def __init__(self, owner: int) -> None:
        self.at = inf
        self.problem = ""
        self.owner, self.source = owner, -1
        self.waits = False


class Event(NamedTuple):
    """An action at a time; `number` orders those of a rank at the same time."""

    time: float
    rank: int
    number: int
    action: Callable[[], None]


class RankState:
    """Clock of one rank, and what it waits for or has yet to notice."""

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.posted = 0
        self.clock = 0.0
        self.blocked = False
        self.pausing = False
        self.doing: Callable[[], str] = str
        self.polls, self.polled_at = 0, -1.0
        self.fresh = False  # whether an operation has been completed since the last pause
        self.later: list[float] = []  # completions that may be after the clock
        self.attended: deque[tuple[float, float]] = deque()  # calls that may not be past
        self.attends = False  # blocked in a call of the communicator
        self.deferred: list[Callable[[], None]] = []  # until its next call

    def attend(self, until: float, now: float) -> None:
        """Note a call of the communicator, from the clock of the rank to a time."""
        while self.attended and self.attended[0][1] < now:
            self.attended.popleft()
        self.attended.append((self.clock, until))

    def poll(self) -> None:
        """Count a test without success; advance the clock in a loop of tests."""
        self.polls = self.polls + 1 if self.clock == self.polled_at else 1
        if self.polls > FREE_TESTS:
            self.clock += POLL
        self.polled_at = self.clock

    def note(self, at: float) -> None:
        """Note the completion of an operation."""
        self.later.append(at)
        if len(self.later) > MOST_LATER:
            self.sort()

    def sort(self) -> None:
        """Recognise the completions that are not after the clock."""
        later = [at for at in self.later if at > self.clock]
        self.fresh = self.fresh or len(later) < len(self.later)
        self.later = later
