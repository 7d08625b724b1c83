"""The critical path of a step: what would have to be faster for the step to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pydtnn.tools.tracing.analysis.blocks import Blocks, excess_over_median, find_blocks, label
from pydtnn.tools.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind


@dataclass(frozen=True)
class PathSegment:
    """A part of the critical path.

    Attributes
    ----------
    rank : int
        On which it was. A message in flight is on the rank that received it.
    start, stop : int
        In ns.
    source : int
        The rank that sent the message for which the rank waited; -1 for what the rank did itself.
    """

    rank: int
    start: int
    stop: int
    source: int = -1


@dataclass(frozen=True)
class PathPart:
    """The time of a layer or phase on the critical path.

    Attributes
    ----------
    rank : int
    kind : Kind
    name : str
        "communication" for the time inside of calls and waits, messages in flight included.
    seconds : float
        In s.
    excess : float
        What the rank needed for it in this step beyond the median of the other ranks, in s; 0 for
        communication and with one rank.
    """

    rank: int
    kind: Kind
    name: str
    seconds: float
    excess: float


@dataclass(frozen=True)
class Path:
    """The critical path of a step.

    Attributes
    ----------
    epoch, step : int
    seconds : float
        From the first start of the step on the path to its last end on any rank, in s.
    segments : list of Segment
        By time.
    parts : list of Part
        Sorted by `seconds`, the longest first.
    late : Part or None
        The layer or phase with the greatest excess; None if none was slower than elsewhere.
    """

    epoch: int
    step: int
    seconds: float
    segments: list[PathSegment]
    parts: list[PathPart]
    late: PathPart | None


class CriticalPaths:
    """Finds the critical paths of steps.

    Parameters
    ----------
    timeline : Timeline
    blocks : Blocks, optional
        Default: `find_blocks`.
    """

    def __init__(self, timeline: Timeline, blocks: Blocks | None = None) -> None:
        self.timeline = timeline
        self.blocks = blocks or find_blocks(timeline)
        self.labels = label(timeline)
        seconds = self.labels.seconds(timeline)
        self._excess = excess_over_median(seconds)
        begin = np.maximum(self.blocks.start[self.blocks.block], self.blocks.posted)
        waited = (self.blocks.ready > begin) & ~self.blocks.starting[self.blocks.block]
        chosen = np.flatnonzero(waited)
        ranks = self.blocks.rank[self.blocks.block[chosen]]
        keys = timeline.activities["rank"].astype("i8") << 8 | timeline.activities["lane"]
        self._main = [
            np.searchsorted(keys, (rank << 8, (rank << 8) + 1)) for rank in range(timeline.size)
        ]
        self._late = []  # positions of the dependencies of each rank that it waited for, by `done`
        for rank in range(timeline.size):
            here = chosen[ranks == rank]
            self._late.append(here[np.argsort(self.blocks.done[here], kind="stable")])

    def find(self, position: int) -> Path:
        """Return the critical path of a step.

        It is followed backwards from the rank that ends the step last. Where this rank has waited
        for a message that was not yet sent, the path continues on the rank that sent it, at the
        time when it did.

        Parameters
        ----------
        position : int
            Of the step in `Timeline.steps`.
        """
        steps = self.timeline.steps
        start, stop = steps.start[position].tolist(), steps.stop[position].tolist()
        rank = stop.index(max(stop))
        time = end = stop[rank]
        segments: list[PathSegment] = []
        while time > start[rank]:
            i = self._last_wait(rank, time)
            if i < 0 or self.blocks.done[i] <= start[rank]:
                segments.append(PathSegment(rank, start[rank], time))
                break
            done, peer = int(self.blocks.done[i]), int(self.blocks.peer[i])
            ready = min(int(self.blocks.ready[i]), done)
            if done < time:
                segments.append(PathSegment(rank, done, time))
            if ready < done:
                segments.append(PathSegment(rank, ready, done, peer))
            rank, time = peer, ready
        segments.reverse()
        parts = self._parts(segments, position)
        late = max(parts, key=lambda part: part.excess, default=None)
        return Path(
            epoch=int(steps.epochs[position]),
            step=int(steps.numbers[position]),
            seconds=(end - segments[0].start) / 1e9 if segments else 0.0,
            segments=segments,
            parts=parts,
            late=late if late is not None and late.excess > 0 else None,
        )

    def _last_wait(self, rank: int, time: int) -> int:
        """Return what a rank waited for last, until a time; -1 if it did not wait.

        Of the dependencies of one block, that which was ready last. When the rank knew that a
        message was complete depends on the order in which it asked.
        """
        late = self._late[rank]
        last = int(np.searchsorted(self.blocks.done[late], time, side="right"))
        while last > 0:
            block = self.blocks.block[late[last - 1]]
            first = int(np.searchsorted(self.blocks.done[late], self.blocks.start[block]))
            here = late[first:last]
            here = here[(self.blocks.block[here] == block) & (self.blocks.ready[here] < time)]
            if len(here):  # none if a peer was ready later, within the error of the clocks
                return int(here[self.blocks.ready[here].argmax()])
            last = min(first, last - 1)
        return -1

    def _parts(self, segments: Sequence[PathSegment], position: int) -> list[PathPart]:
        """Return the time of each layer and phase on the path."""
        totals: dict[tuple[int, int], int] = {}  # by rank and label, in ns
        for segment in segments:
            if segment.source >= 0:
                key = segment.rank, 0
                totals[key] = totals.get(key, 0) + segment.stop - segment.start
                continue
            codes, durations = self._within(segment, position)
            for code in np.unique(codes).tolist():
                key = segment.rank, code
                totals[key] = totals.get(key, 0) + int(durations[codes == code].sum())
        found = []
        for (rank, code), total in totals.items():
            if not total:
                continue
            kind, name = self.labels.table[code]
            excess = 0.0 if code == 0 else float(self._excess[code, position, rank])
            found.append(PathPart(rank, kind, name, total / 1e9, excess))
        return sorted(found, key=lambda part: -part.seconds)

    def _within(self, segment: PathSegment, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return labels and exclusive durations, in ns, of the activities within a segment."""
        first, last = self._main[segment.rank].tolist()
        starts = self.timeline.activities["start"][first:last]
        begin = self.timeline.steps.start[position, segment.rank]
        low, high = (first + np.searchsorted(starts, (begin, segment.stop))).tolist()
        here = self.timeline.activities[low:high]
        length = np.minimum(here["stop"], segment.stop) - np.maximum(here["start"], segment.start)
        length = np.maximum(length, 0)
        nested = np.zeros_like(length)
        inside = here["parent"] >= low
        np.add.at(nested, here["parent"][inside] - low, length[inside])
        codes = self.labels.codes[low:high]
        kept = (codes >= 0) & (length > 0)
        return codes[kept], (length - nested)[kept]
