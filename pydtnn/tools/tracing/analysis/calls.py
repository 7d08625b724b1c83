"""What each rank of a trace did in its steps, as a program: calls, and computation between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from pydtnn.tools.tracing.analysis.blocks import find_blocks, label
from pydtnn.tools.tracing.analysis.states import count_open, innermost
from pydtnn.tools.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind

POSTS = ("isend", "irecv", "exchange")
"""Operations that post messages between two ranks."""


@dataclass
class Side:
    """One side of a message between two ranks.

    Attributes
    ----------
    peer, tag, nbytes : int
        The other rank, tag and length in B.
    sends : bool
    stop : int
        When it was known to be complete, in ns.
    """

    peer: int
    tag: int
    nbytes: int
    sends: bool
    stop: int


@dataclass
class TracedCall:
    """A call or wait of a rank, or a test of its requests.

    Attributes
    ----------
    time, stop : int
        In ns.
    name, group : str
        Of the operation, and of its group of ranks.
    nbytes : int
        As the communicator counts them, in B.
    waits : bool
        Whether it waits for a request.
    counts : list of int
        Bytes of the part of each rank, of an "allgather".
    messages : list of Side
        That it posts.
    """

    time: int
    stop: int
    name: str = "test"
    group: str = ""
    nbytes: int = 0
    waits: bool = False
    counts: list[int] = field(default_factory=list)
    messages: list[Side] = field(default_factory=list)

    def length(self, size: int) -> int:
        """Return the length of the whole array of a collective call of some ranks, in B."""
        if size == 1 or self.name in POSTS:
            return 0
        passes = 2 if self.name in ("allreduce", "iallreduce") else 1
        return round(self.nbytes * size / (passes * (size - 1)))

    def awaited(self, posts: Sequence[TracedCall]) -> int:
        """Return which of the calls that posted messages a wait has waited for.

        It is the one whose last message was complete in the wait, or before it.
        """
        ends = [max((one.stop for one in post.messages), default=0) for post in posts]
        within = [place for place, end in enumerate(ends) if self.time <= end <= self.stop]
        earlier = [place for place, end in enumerate(ends) if end < self.time]
        return (within or earlier or [0])[0]


@dataclass
class RankProgram:
    """What a rank does: its calls by time, and its computation as a function of recorded time.

    Attributes
    ----------
    calls : list of Call
    times, computed : ndarray
        Recorded times, and the computation up to each, in ns.
    """

    calls: list[TracedCall]
    times: np.ndarray
    computed: np.ndarray

    def compute(self, start: int, stop: int) -> float:
        """Return the computation between two recorded times, in s."""
        before, after = np.interp((start, stop), self.times, self.computed)
        return 1e-9 * float(after - before)


class Programs:
    """The programs of all ranks of a trace.

    Parameters
    ----------
    timeline : Timeline

    Attributes
    ----------
    groups : dict of str to list of int
        The ranks of each group in which calls are made, by its name.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._labels = label(timeline)
        self._inside, self._calls = self._find_calls()
        self.groups = self._find_groups()

    def of(self, without: Collection[int] = ()) -> list[RankProgram]:
        """Return the program of each rank.

        Parameters
        ----------
        without : collection of int
            Ranks that compute, in every layer and phase of a step, as long as the median of the
            others does.
        """
        factors = self._factors(without)
        return [self._rank(rank, factors) for rank in range(self.timeline.size)]

    def _find_calls(self) -> tuple[np.ndarray, list[list[TracedCall]]]:
        """Return which activities are calls or waits, and those of each rank within its steps."""
        timeline, steps = self.timeline, self.timeline.steps
        blocks, names = find_blocks(timeline), timeline.names
        inside = np.zeros(len(timeline.activities), bool)
        inside[blocks.activity] = True
        calls: list[list[TracedCall]] = [[] for _ in range(timeline.size)]
        for one in timeline.rows(blocks.activity):
            if steps.place(one.rank, np.array([one.start]))[0] >= 0:
                name, group = names[one.name], names[one.group] if one.group >= 0 else "all"
                waits = one.kind == Kind.WAIT
                calls[one.rank].append(
                    TracedCall(one.start, one.stop, name, group, one.nbytes, waits)
                )
        self._add_messages(calls)
        self._add_counts(calls)
        # Between two layers of backward, requests are tested; it is recorded if one is complete.
        for one in timeline.rows(np.flatnonzero(timeline.activities["kind"] == Kind.BACKWARD)):
            calls[one.rank].append(TracedCall(one.start, one.start))
        return inside, [sorted(found, key=lambda call: call.time) for found in calls]

    def _add_messages(self, calls: list[list[TracedCall]]) -> None:
        """Add messages between two ranks to the calls that post them."""
        posts = [[one for one in own if one.name in POSTS and not one.waits] for own in calls]
        starts = [np.array([call.time for call in own], "i8") for own in posts]

        def poster(rank: int, time: int, group: int) -> TracedCall | None:
            place = int(np.searchsorted(starts[rank], time, side="right")) - 1
            call = posts[rank][place] if place >= 0 else None
            if call is None or time > call.stop or call.group != self.timeline.names[group]:
                return None  # of a schedule, or outside of the steps
            return call

        for sent, received in self.timeline.messages.pairs():
            sender = poster(sent.source, sent.start, sent.group)
            receiver = poster(received.target, received.start, received.group)
            if sender and receiver:
                for call, one, peer in (
                    (sender, sent, sent.target),
                    (receiver, received, sent.source),
                ):
                    side = Side(peer, one.tag, one.nbytes, one is sent, one.stop)
                    call.messages.append(side)

    def _add_counts(self, calls: list[list[TracedCall]]) -> None:
        """Add the bytes of all ranks to the calls that gather parts of different length."""
        gathers: dict[str, list[list[TracedCall]]] = {}
        for own in calls:
            mine: dict[str, list[TracedCall]] = {}
            for call in own:
                if call.name == "allgather":
                    mine.setdefault(call.group, []).append(call)
            for group, found in mine.items():
                gathers.setdefault(group, []).append(found)
        for members in gathers.values():
            for meeting in zip(*members, strict=False):
                parts = [call.nbytes // max(len(members) - 1, 1) for call in meeting]
                for call in meeting:
                    call.counts = parts

    def _find_groups(self) -> dict[str, list[int]]:
        """Return the ranks of each group that calls are made in, by its name."""
        found: dict[str, list[int]] = {}
        for rank, own in enumerate(self._calls):
            for group in dict.fromkeys(call.group for call in own if call.group):
                found.setdefault(group, []).append(rank)
        return dict(sorted(found.items()))

    def _rank(self, rank: int, factors: np.ndarray) -> RankProgram:
        """Return what a rank does, with factors ``(labels, steps, ranks)`` on its computation."""
        timeline, steps = self.timeline, self.timeline.steps
        chosen = timeline.select(rank=rank, main=True)
        activities = timeline.activities[chosen]
        start, stop = activities["start"], activities["stop"]
        bounds = [steps.start[:, rank], steps.stop[:, rank]]
        times = np.unique(np.concatenate([start, stop, *bounds]))
        place = innermost(times, start, stop)
        step = steps.place(rank, times[:-1])
        codes = np.where(place >= 0, self._labels.codes[chosen[place]], -1)
        inside = self._inside[chosen]
        called = count_open(times, start[inside], stop[inside]) > 0
        rate = np.where(codes >= 0, factors[codes, step, rank], 1.0)
        rate[called | (step < 0)] = 0.0
        computed = np.append(0.0, np.cumsum(rate * np.diff(times)))
        return RankProgram(self._calls[rank], times, computed)

    def _factors(self, without: Collection[int]) -> np.ndarray:
        """Return the factors on the computation of each label, step and rank."""
        seconds = self._labels.seconds(self.timeline)
        factors = np.ones_like(seconds)
        others = [rank for rank in range(self.timeline.size) if rank not in without]
        usual = np.median(seconds[:, :, others], axis=2)
        for rank in without:
            own = seconds[:, :, rank]
            both = (own > 0) & (usual > 0)
            factors[:, :, rank][both] = usual[both] / own[both]
        return factors
