"""Segments: the parts of a rank's step between two notifications of an observer.

A segment ends with the begin or end of any activity. It belongs to the innermost activity in which
it lies, which is the pass of a node or a phase of training. Time inside the calls of a communicator
belongs to no segment: it is that of messages, whether a call starts one, waits for it or tests it.
What a scheme or a compressor computes between its calls belongs to the phase or pass in which it
does so.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from pydtnn.comm.traffic import Traffic
from pydtnn.tools.perfmodel.compute.base import Label
from pydtnn.utils.observer import Kind, Observer

NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.PHASE: "phase"}
"""Kinds of activities with segments, by the names in labels; others are of the communicator."""

PARTS = (Kind.KERNEL, Kind.LOAD)
"""Activities inside segments, which are reported in some runs only, and end no segment."""


class SegmentObserver(Observer):
    """Base of observers that divide the time of a thread into segments.

    Subclasses define `notified`, and begin with `ending`.
    """

    def __init__(self) -> None:
        self._open: list[_Activity] = []
        self._parts = 0  # activities in progress that end no segment

    def notified(self) -> None:
        """Called when an activity that ends a segment begins or ends, before it does."""

    def lane(self, name: str) -> Observer:
        """Return an observer that ignores another thread."""
        return Observer()

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        if kind in PARTS:
            self._parts += 1
            return
        self.notified()
        self._open.append(_Activity(NAMES.get(kind, ""), name))

    def end(self) -> None:
        if self._parts:
            self._parts -= 1
            return
        self.notified()
        self._open.pop()

    @property
    def named(self) -> Label | None:
        """The innermost activity with segments, as the label of its first; None outside of all."""
        found = next((one for one in reversed(self._open) if one.kind), None)
        return None if found is None else Label(found.kind, found.name)

    def ending(self) -> Label | None:
        """Return the label of the segment that a notification ends, and count it.

        Returns
        -------
        Label or None
            None for time inside a communicator, or outside of all phases.
        """
        if not self._open or not self._open[-1].kind:
            return None
        activity = self._open[-1]
        label = Label(activity.kind, activity.name, activity.segments)
        activity.segments += 1
        return label


class _Activity:
    """An activity; `kind` is that of labels, empty in a communicator."""

    __slots__ = ("kind", "name", "segments")

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name, self.segments = kind, name, 0


class SegmentTimes(SegmentObserver):
    """Measure the segments of each step.

    Parameters
    ----------
    clock : callable
        Returns a time in ns: by default that of the wall; `time.thread_time_ns` does not count the
        time in which the system runs other programs.

    Attributes
    ----------
    traffic : Traffic
        Of the rank's communicator, whose calls take time that is not part of a segment; to be set
        before the first step.
    passed : int
        Samples of the last passes.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        super().__init__()
        self.traffic = Traffic()
        self.passed = 0
        self._clock = clock
        self._before, self._inside = 0, 0.0  # at the last notification, in ns and s
        self._sums: dict[Label, list[float]] = defaultdict(lambda: [0.0, 0])

    def samples(self, samples: int) -> None:
        self.passed = samples

    def notified(self) -> None:
        now, inside = self._clock(), self.traffic.seconds
        if label := self.ending():
            entry = self._sums[label]
            entry[0] += max(1e-9 * (now - self._before) - (inside - self._inside), 0.0)
            entry[1] += 1
        # the time of this observer is not part of a segment
        self._before, self._inside = self._clock(), inside

    def take(self) -> dict[Label, float]:
        """Return the segments since the last call, and forget them; between two steps.

        Returns
        -------
        dict
            The mean time of each segment by its label, over all executions of the activity, in s.
        """
        means = {label: total / count for label, (total, count) in self._sums.items()}
        self._sums.clear()
        return means
