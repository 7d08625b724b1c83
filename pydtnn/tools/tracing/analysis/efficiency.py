"""Efficiencies of a parallel run, as defined by POP."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pydtnn.tools.tracing.analysis.blocks import Blocks, find_blocks
from pydtnn.tools.tracing.timeline import Steps, Timeline

BEGIN, SEND, RECEIVE, END, STOP = range(5)
"""Events, in the order of those that happen at the same time."""


def replay(timeline: Timeline, blocks: Blocks, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return how long ranks would need if communication took no time.

    Compute takes as long as recorded. A message arrives when it is sent. It is sent when the
    preceding events of its group and tag on that rank are complete and, unless it follows a message
    that was received in the same call or wait, when the main thread is there. A wait ends when the
    messages that arrived in it do; a collective call without recorded messages ends when the rank
    that entered the communicator last has done so. All dependencies are in the order of the
    recorded times, so the result is not longer than the recorded run.

    Parameters
    ----------
    timeline : Timeline
    blocks : Blocks
    start, stop : ndarray of int, shape ``(ranks,)``
        The part of the run that is replayed, in ns.

    Returns
    -------
    ndarray of int, shape ``(ranks,)``
        When each rank would reach `stop`, in ns.

    References
    ----------
    The model is that of Dimemas for a network without latency and with infinite bandwidth: Labarta,
    J. et al., DiP: A Parallel Program Development Environment, Euro-Par 1996.
    """
    return _IdealReplay(timeline, blocks, start).run(_events(timeline, blocks, start, stop))


def _events(timeline: Timeline, blocks: Blocks, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return (time, event, rank, position) of everything in the part, by time."""
    sent, received = timeline.messages.sent, timeline.messages.received
    count = np.arange(len(sent))
    # The residual error of the clocks must not let a message arrive before it is sent.
    arrived = np.maximum(received["stop"], sent["start"])
    ranks = np.arange(timeline.size)
    every = np.arange(len(blocks))
    parts = [
        (blocks.start, BEGIN, blocks.rank, every),
        (sent["start"], SEND, sent["source"], count),
        (arrived, RECEIVE, received["target"], count),
        (blocks.stop, END, blocks.rank, every),
        (stop, STOP, ranks, ranks),
    ]
    columns = [
        np.stack([time, np.full(len(time), event), rank, position]).astype("i8")
        for time, event, rank, position in parts
    ]
    events = np.concatenate(columns, axis=1)
    inside = (events[0] >= start[events[2]]) & (events[0] <= stop[events[2]])
    events = events[:, inside]
    return events[:, np.lexsort((events[1], events[0]))].T


class _IdealReplay:
    """The times of an ideal network, while the events of a trace pass."""

    def __init__(self, timeline: Timeline, blocks: Blocks, start: np.ndarray) -> None:
        sent = timeline.messages.sent
        self.channels = list(zip(sent["group"].tolist(), sent["tag"].tolist(), strict=True))
        self.starting: list[bool] = blocks.starting.tolist()
        self.ideal: list[int] = start.tolist()  # of the main thread, when it left the last block
        self.left: list[int] = start.tolist()  # the recorded time then
        self.within = [-1] * timeline.size
        self.until = [0] * timeline.size  # when the block can end
        self.sent: dict[int, int] = {}
        # By rank and channel, when its last event was, and the block of the last receive.
        self.chains: dict[tuple[int, tuple[int, int]], tuple[int, int]] = {}
        self.entries: dict[tuple[int, int], int] = {}  # ideal by recorded time
        self.collective: dict[int, tuple[int, int]] = {}
        for i in np.flatnonzero(blocks.message < 0).tolist():
            self.collective[int(blocks.block[i])] = int(blocks.peer[i]), int(blocks.ready[i])

    def run(self, events: np.ndarray) -> np.ndarray:
        finished = list(self.ideal)
        for time, event, rank, position in events.tolist():
            if event == BEGIN:
                self.begin(time, rank, position)
            elif event == END:
                self.end(time, rank, position)
            elif event == STOP:
                finished[rank] = self.main(time, rank)
            else:
                self.message(time, event, rank, position)
        return np.array(finished, "i8")

    def main(self, time: int, rank: int) -> int:
        """Return when the main thread of a rank is where it was at a recorded time."""
        inside = self.within[rank] >= 0
        return self.ideal[rank] + (0 if inside else time - self.left[rank])

    def begin(self, time: int, rank: int, block: int) -> None:
        if self.within[rank] >= 0:  # which ends at the same time
            self.end(time, rank, self.within[rank])
        self.ideal[rank] = self.until[rank] = self.entries[rank, time] = self.main(time, rank)
        self.within[rank] = block

    def end(self, time: int, rank: int, block: int) -> None:
        if self.within[rank] == block:
            entry = self.entries.get(self.collective.get(block, (-1, -1)), 0)
            self.ideal[rank] = max(self.until[rank], entry)
            self.within[rank] = -1
            self.left[rank] = time
        elif self.within[rank] < 0:  # it began before the part
            self.left[rank] = time

    def message(self, time: int, event: int, rank: int, position: int) -> None:
        chain, block = (rank, self.channels[position]), self.within[rank]
        before, after_receive = self.chains.get(chain, (0, -1))
        if event == SEND:
            # A message that follows another one within a block is a consequence of it.
            caused = block >= 0 and after_receive == block
            moment = max(before, 0 if caused else self.main(time, rank))
            self.sent[position] = moment
        else:
            moment = max(self.sent.get(position, 0), before)
            after_receive = block
            if block >= 0 and not self.starting[block]:
                self.until[rank] = max(self.until[rank], moment)
        self.chains[chain] = moment, after_receive


@dataclass(frozen=True)
class Efficiency:
    """Efficiencies of the training steps; 1 is ideal.

    Useful time U is that of the main thread outside of the communicator; the wait for a batch is
    part of it. T is the time of the steps, and T' the time that they would take on a network on
    which messages and calls take no time (`replay`).

    Attributes
    ----------
    runtime : float
        T, in s.
    ideal_runtime : float
        T', in s.
    useful : ndarray of float, shape ``(ranks,)``
        U of each rank, in s.

    References
    ----------
    POP Standard Metrics for Parallel Performance Analysis, Performance Optimisation and
    Productivity Centre of Excellence, https://pop-coe.eu/node/69; Rosas, C., Giménez, J. and
    Labarta, J., Scalability prediction for fundamental performance factors, Supercomputing
    Frontiers and Innovations 1 (2), 2014.
    """

    runtime: float
    ideal_runtime: float
    useful: np.ndarray

    @property
    def parallel(self) -> float:
        """Mean of U over T: load balance x serialisation x transfer."""
        return float(self.useful.mean()) / self.runtime

    @property
    def load_balance(self) -> float:
        """Mean of U over its maximum."""
        return float(self.useful.mean() / self.useful.max())

    @property
    def serialisation(self) -> float:
        """Maximum of U over T': the loss because ranks depend on each other."""
        return float(self.useful.max()) / self.ideal_runtime

    @property
    def transfer(self) -> float:
        """T' over T: the loss because messages and calls take time."""
        return self.ideal_runtime / self.runtime


def efficiency(timeline: Timeline, blocks: Blocks | None = None) -> Efficiency | None:
    """Return the efficiencies of the training steps.

    Parameters
    ----------
    timeline : Timeline
    blocks : Blocks, optional
        Default: `find_blocks`.

    Returns
    -------
    Efficiency or None
        None if no training step was recorded. The times are summed over the parts of the run that
        consist of consecutive steps of an epoch.
    """
    blocks = blocks or find_blocks(timeline)
    runtime, ideal, useful = 0, 0, np.zeros(timeline.size)
    for first, last in _parts(timeline.steps):
        start, stop = timeline.steps.start[first], timeline.steps.stop[last]
        runtime += int(stop.max() - start.min())
        ideal += int(replay(timeline, blocks, start, stop).max() - start.min())
        for rank in range(timeline.size):
            here = blocks.rank == rank
            begin = np.clip(blocks.start[here], start[rank], stop[rank])
            end = np.clip(blocks.stop[here], start[rank], stop[rank])
            useful[rank] += stop[rank] - start[rank] - (end - begin).sum()
    return Efficiency(runtime / 1e9, ideal / 1e9, useful / 1e9) if runtime else None


def _parts(steps: Steps) -> list[tuple[int, int]]:
    """Return the first and the last of consecutive steps of an epoch."""
    if not len(steps):
        return []
    breaks = np.flatnonzero((np.diff(steps.epochs) != 0) | (np.diff(steps.numbers) != 1))
    firsts = np.append(0, breaks + 1)
    lasts = np.append(breaks, len(steps) - 1)
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
