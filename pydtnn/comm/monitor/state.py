"""The state of a run for those who watch its ranks, without processes, sockets and clocks.

The same table serves the monitor process of a host, which watches its ranks from their start, and
the process that watches a rank while MPI starts (`pydtnn.comm.ulfm`). They report events, and take
the actions of the transition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum

STARTED, LEFT, LOST, FAILED = "started", "left", "lost", "failed"
"""States of a rank: its program has ended as expected, it has ended otherwise while the others
continue, or while they do not."""


class RunState(Enum):
    """Where a run is.

    STARTING: not all ranks are watched. RUNNING: all are. REPORTED: an error has been reported, and
    the ranks are ending. ENDING: they are ended. ENDED: there is nothing left to watch.
    """

    STARTING, RUNNING, REPORTED, ENDING, ENDED = range(5)


_S = RunState
_REMAINING = _S.STARTING, _S.RUNNING, _S.REPORTED

TRANSITIONS: dict[tuple[RunState, str], tuple[RunState, tuple[str, ...]]] = {
    **{(state, "end"): (_S.ENDING, ("end",)) for state in _REMAINING},  # another process says so
    **{(state, "no rank"): (_S.ENDED, ()) for state in RunState},
    # a rank ends before all are there, is stopped, or does not come before the deadline
    (_S.STARTING, "ready"): (_S.RUNNING, ()),
    (_S.STARTING, FAILED): (_S.ENDING, ("report", "end")),
    (_S.STARTING, LOST): (_S.STARTING, ("report", "kill")),
    (_S.STARTING, "late"): (_S.ENDING, ("report", "end")),
    # a rank waits for one whose program has ended
    (_S.RUNNING, "absent"): (_S.ENDING, ("report", "end")),
    # a rank fails
    (_S.RUNNING, LOST): (_S.RUNNING, ("go on",)),
    (_S.RUNNING, FAILED): (_S.ENDING, ("report", "end")),
    (_S.RUNNING, "reported"): (_S.REPORTED, ()),
    (_S.REPORTED, LOST): (_S.ENDING, ("report", "end")),
    (_S.REPORTED, FAILED): (_S.ENDING, ("report", "end")),
    # a wait has passed its deadline, or the end after an error
    (_S.RUNNING, "late"): (_S.ENDING, ("table", "end")),
    (_S.RUNNING, "exclude"): (_S.RUNNING, ("exclude",)),
    (_S.REPORTED, "late"): (_S.ENDING, ("table", "end")),
    (_S.REPORTED, "exclude"): (_S.REPORTED, ("exclude",)),
    (_S.REPORTED, "overdue"): (_S.ENDING, ("end",)),
}
"""By state and event, the next state and what is done; other events have no meaning there."""


class WatchedRun:
    """The state of a run, and the states of the ranks that are watched.

    Parameters
    ----------
    ranks : iterable of int
    state : RunState
    """

    def __init__(self, ranks: Iterable[int], state: RunState = RunState.RUNNING) -> None:
        self.ranks = dict.fromkeys(ranks, STARTED)
        self.state = state
        self._excluded: set[int] = set()

    def on(self, event: str) -> tuple[str, ...]:
        """Return what is to be done because of an event."""
        self.state, actions = TRANSITIONS.get((self.state, event), (self.state, ()))
        return actions

    def end_of(self, rank: int, state: str) -> tuple[str, ...]:
        """Return what is to be done because a rank has ended; nothing the second time."""
        if self.ranks.get(rank, STARTED) != STARTED:
            return ()
        self.ranks[rank] = state
        actions = () if state == LEFT else self.on(state)
        if STARTED not in self.ranks.values():
            self.on("no rank")
        return actions

    def exclude(self, ranks: Sequence[int]) -> list[int]:
        """Return which of the ranks are to be killed, so that others continue: those not before."""
        new = [rank for rank in ranks if rank not in self._excluded and self.on("exclude")]
        self._excluded.update(new)
        return new

    @property
    def ends(self) -> bool:
        """Whether the end of the run is certain."""
        return self.state in (RunState.ENDING, RunState.ENDED)


SETTLED_S = 20.0
"""Seconds after a decision in which requests are part of it: ranks may not have received it yet."""


class LastStepVote:
    """Agreement of the ranks on the last step of a run that a signal ends.

    Ranks send no message for it while they train. When a rank is signalled, the process that
    watches the first host asks every rank how many steps it has begun, and none begins another
    until all have answered; the largest number is the last step. No rank has then begun a later
    one, and none waits for another in an earlier one.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    tell : callable
        Sends a message to every rank.
    """

    def __init__(self, ranks: int, tell: Callable[..., None]) -> None:
        self._ranks, self._tell = ranks, tell
        self._request: tuple[int, int] | None = None  # signal, rank
        self._begun: dict[int, int] = {}
        self._settled_at, self._now = 0.0, 0.0

    def lose(self, rank: int) -> None:
        """Agree without a rank, which has failed."""
        self._ranks -= 1
        self._begun.pop(rank, None)
        self._decide_if_complete()

    def request(self, signal: int, rank: int, now: float) -> None:
        """End the run, as a rank has received a signal; later ones are part of the same request."""
        if self._request is None and now > self._settled_at:
            self._request, self._now = (signal, rank), now
            self._tell("freeze")

    def give_up(self) -> None:
        """End the run at once if it is to end: not all ranks can answer."""
        if self._request is not None:
            self._decide(-1)

    def answer(self, rank: int, begun: int) -> None:
        """Store how many steps a rank has begun; -1 if it is not in training."""
        if self._request is not None:
            self._begun[rank] = begun
            self._decide_if_complete()

    def _decide_if_complete(self) -> None:
        if self._request is not None and len(self._begun) == self._ranks:
            steps = self._begun.values()
            self._decide(max(steps) if min(steps, default=-1) >= 0 else -1)

    def _decide(self, step: int) -> None:
        assert self._request is not None
        signal, first = self._request
        self._settled_at = self._now + SETTLED_S if step >= 0 else 0.0
        self._request = None
        self._begun.clear()
        self._tell("last", step, signal, first)
