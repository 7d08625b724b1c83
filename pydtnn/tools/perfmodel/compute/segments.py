"""Segments: the parts of a rank's step between two notifications of an observer.

A segment ends with the begin or end of any activity. It belongs to the innermost activity in which
it lies, which is the pass of a node or a phase of training. Time inside the calls of a communicator
belongs to no segment: it is that of messages, whether a call starts one, waits for it or tests it.
What a scheme or a compressor computes between its calls belongs to the phase or pass in which it
does so.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pydtnn.comm.traffic import Traffic
from pydtnn.tools.perfmodel.compute.base import Label
from pydtnn.utils.observer import Kind, Observer

NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.PHASE: "phase"}
"""Kinds of activities with segments, by the names in labels."""

COMMUNICATION = (Kind.CALL, Kind.WAIT)
"""Kinds of activities that belong to the communicator."""


class Activities:
    """The activities of one thread that have begun and not ended.

    Calls of kernels, which are reported only if they are traced, do not end a segment.
    """

    def __init__(self) -> None:
        self._open: list[_Activity] = []

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

    def begin(self, kind: Kind, name: str) -> None:
        """Enter an activity, after `ending`."""
        self._open.append(_Activity("" if kind in COMMUNICATION else NAMES[kind], name))

    def end(self) -> None:
        """Leave the innermost activity, after `ending`."""
        self._open.pop()


class _Activity:
    """An activity; `kind` is that of labels, empty in a communicator."""

    __slots__ = ("kind", "name", "segments")

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name, self.segments = kind, name, 0


class SegmentTimes(Observer):
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
        self.traffic = Traffic()
        self.passed = 0
        self._clock = clock
        self._log: list[_Notification] = []
        self._kernels = 0

    def lane(self, name: str) -> Observer:
        """Return an observer that ignores another thread."""
        return Observer()

    def samples(self, samples: int) -> None:
        self.passed = samples

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        if kind is Kind.KERNEL:
            self._kernels += 1
            return
        now = self._clock()
        self._log.append((now, self.traffic.seconds, kind, name, self._clock()))

    def end(self) -> None:
        if self._kernels:
            self._kernels -= 1
            return
        now = self._clock()
        self._log.append((now, self.traffic.seconds, None, "", self._clock()))

    def take(self) -> dict[Label, float]:
        """Return the segments since the last call, and forget them; between two steps.

        Returns
        -------
        dict
            The mean time of each segment by its label, over all executions of the activity, in s.
        """
        sums: dict[Label, list[float]] = {}
        activities = Activities()
        before, inside = 0, 0.0
        for now, seconds, kind, name, after in self._log:
            label = activities.ending()
            if label is not None:
                entry = sums.setdefault(label, [0.0, 0])
                entry[0] += max(1e-9 * (now - before) - (seconds - inside), 0.0)
                entry[1] += 1
            if kind is None:
                activities.end()
            else:
                activities.begin(kind, name)
            before, inside = after, seconds  # the time of this observer is not part of a segment
        self._log.clear()
        return {label: total / count for label, (total, count) in sums.items()}


_Notification = tuple[int, float, Kind | None, str, int]
"""Time, seconds in the communicator, what begins (None: something ends), and the time after it."""
