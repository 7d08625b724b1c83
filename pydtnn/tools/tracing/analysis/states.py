"""What the main thread of each rank did at each time: compute, communicate or wait."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from pydtnn.tools.tracing.analysis.blocks import Blocks, find_blocks
from pydtnn.tools.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind


class State(IntEnum):
    """What a rank does; `OVERLAP` is compute while an operation is in flight."""

    OUTSIDE = 0
    COMPUTE = 1
    OVERLAP = 2
    COMMUNICATION = 3
    WAITING = 4


@dataclass
class States:
    """The states of the main thread of a rank.

    Attributes
    ----------
    times : ndarray of int, shape ``(n + 1,)``
        Ascending, in ns: starts and stops of steps, calls and waits, and of what is in flight.
    state : ndarray of int, shape ``(n,)``
        The `State` from each time to the next.
    """

    times: np.ndarray
    state: np.ndarray

    @property
    def seconds(self) -> np.ndarray:
        """Time in each `State`, in s."""
        return np.bincount(self.state, np.diff(self.times), len(State)) / 1e9


def find_states(timeline: Timeline, blocks: Blocks | None = None) -> list[States]:
    """Return the states of each rank.

    A sum is in flight from the call that starts it to the end of the wait for it, a message between
    two ranks until it is known to be complete.

    Parameters
    ----------
    timeline : Timeline
    blocks : Blocks, optional
        Default: `find_blocks`.
    """
    blocks = blocks or find_blocks(timeline)
    shares = blocks.waiting()[1]
    begin = np.maximum(blocks.start[blocks.block], blocks.posted)
    found = []
    for rank in range(timeline.size):
        own, waits = blocks.rank == rank, (blocks.rank[blocks.block] == rank) & (shares > 0)
        steps = timeline.steps.start[:, rank], timeline.steps.stop[:, rank]
        called = blocks.start[own], blocks.stop[own]
        waiting = begin[waits], (begin + shares)[waits]
        flying = _in_flight(timeline, blocks, rank)
        times = np.unique(np.concatenate([*steps, *called, *waiting, *flying]))
        state = np.full(max(len(times) - 1, 0), State.COMPUTE.value)
        for intervals, value in (
            (flying, State.OVERLAP),
            (called, State.COMMUNICATION),
            (waiting, State.WAITING),
        ):
            state[count_open(times, *intervals) > 0] = value
        state[count_open(times, *steps) == 0] = State.OUTSIDE
        found.append(States(times, state))
    return found


def _in_flight(timeline: Timeline, blocks: Blocks, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and stops of the messages and the sums of a rank, in ns."""
    messages = timeline.messages
    sides = [
        array[array[field] == rank]
        for field, arrays in (
            ("source", (messages.sent, messages.unmatched_sent)),
            ("target", (messages.received, messages.unmatched_received)),
        )
        for array in arrays
    ]
    starts, stops = (list(np.concatenate([one[end] for one in sides])) for end in ("start", "stop"))
    activities = timeline.activities[blocks.activity]
    sums = (blocks.rank == rank) & (activities["name"] == timeline.name_id("iallreduce"))
    for group in np.unique(activities["group"][sums]):
        here = sums & (activities["group"] == group)
        waits = blocks.stop[here & (activities["kind"] == Kind.WAIT)].tolist()
        # Which wait belongs to which call does not matter for their union.
        for start in blocks.start[here & (activities["kind"] == Kind.CALL)].tolist():
            while waits and waits[0] < start:
                waits.pop(0)  # of a call before the trace
            if waits:
                starts.append(start)
                stops.append(waits.pop(0))
    return np.array(starts, "i8"), np.array(stops, "i8")


def count_open(times: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return how many intervals contain the time from each of `times` to the next."""
    change = np.zeros(len(times), int)
    np.add.at(change, np.searchsorted(times, start), 1)
    np.add.at(change, np.searchsorted(times, stop), -1)
    return np.cumsum(change)[:-1]
