"""Traces that a small model of a training run makes: several ranks, a ring, skewed clocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pydtnn.tools.tracing.records import RECORD, write_trace
from pydtnn.utils.observer import Kind

MS = 1_000_000
LAYERS = {"conv1": (2 * MS, 5 * MS), "conv2": (3 * MS, 6 * MS), "fc": (1 * MS, 2 * MS)}
"""Durations of forward and backward, in ns."""

Slower = Callable[[int, int, int, str], int]
"""Returns what (rank, epoch, step, activity) takes in addition, in ns."""


def nothing(rank: int, epoch: int, step: int, activity: str) -> int:
    return 0


class Rank:
    """Writes the records of a rank; `now` is the time of rank 0's clock, in ns."""

    def __init__(self, rank: int, now: int) -> None:
        self.rank, self.now = rank, now
        self.names: dict[str, int] = {}
        self.records: list[tuple[int, ...]] = []
        self.open: list[tuple[int, int, int, int, int]] = []
        self.epoch = self.step = -1
        self.sent = 0

    def begin(self, kind: Kind, name: str, nbytes: int = 0, bucket: int = -1) -> None:
        self.open.append((kind, self.id(name), self.now, nbytes, bucket))
        self.sent += nbytes

    def end(self, memory: int = 1000) -> None:
        kind, name, start, nbytes, bucket = self.open.pop()
        place = (len(self.open), name, self.epoch, self.step)
        times = (start, self.now - start)
        group = self.id("all") if kind in (Kind.CALL, Kind.WAIT) else -1
        self.records.append((kind, 0, *place, *times, nbytes, -1, -1, bucket, group, memory))

    def run(self, kind: Kind, name: str, duration: int, **more: int) -> None:
        self.begin(kind, name, **more)
        self.now += duration
        self.end()

    def other(self, kind: Kind, name: str, start: int, duration: int, **more: int) -> None:
        """A message, or an activity of another thread."""
        lane, nbytes = more.get("lane", 0), more.get("nbytes", 0)
        place = (0, self.id(name), self.epoch, self.step)
        ends = (more.get("peer", -1), more.get("tag", -1), -1, -1, -1)
        self.records.append((kind, lane, *place, start, duration, nbytes, *ends))

    def id(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))


def write_run(
    folder: Path,
    *,
    ranks: int = 4,
    epochs: int = 1,
    steps: int = 5,
    slower: Slower = nothing,
    latency: int = MS // 10,
    messages: bool = True,
    noise: float = 0.0,
    skew: bool = True,
    whole: bool = True,
) -> list[Rank]:
    """Simulate a run and write its traces. Gradients are summed by a ring in two buckets.

    Without `messages` the sums are collective calls that end when all ranks have arrived. If it is
    not `whole`, epochs have no records, as where some of their steps are recorded.
    """
    random = np.random.default_rng(7)
    all_ranks = [Rank(rank, 1000 * MS + rank * MS // 10) for rank in range(ranks)]

    def work(rank: Rank, kind: Kind, name: str, activity: str, duration: int, **more: int) -> None:
        extra = slower(rank.rank, rank.epoch, rank.step, activity)
        factor = 1 + noise * float(random.random())
        rank.run(kind, name, int(duration * factor) + extra, **more)

    def wait_for(rank: Rank, name: str, bucket: int, moments: list[int]) -> None:
        rank.begin(Kind.WAIT, name, bucket=bucket)
        rank.now = max(rank.now, *moments)
        rank.end()

    for epoch in range(1, epochs + 1):
        for rank in all_ranks:
            rank.step = -1
            rank.epoch = epoch
            if whole:
                rank.begin(Kind.PHASE, "epoch")
        for step in range(steps):
            for rank in all_ranks:
                rank.step = step
                late = slower(rank.rank, epoch, step, "callback")
                if late:
                    rank.step = -1
                    rank.run(Kind.PHASE, "callback Late", late)
                    rank.step = step
                before = rank.now
                work(rank, Kind.PHASE, "data", "data", MS // 2)
                loading = 4 * MS + slower(rank.rank, epoch, step, "data")
                rank.other(Kind.LOAD, "batch", before, loading, lane=1)
                rank.begin(Kind.PHASE, "step")
                rank.begin(Kind.PHASE, "forward")
                for name, (forward, _) in LAYERS.items():
                    work(rank, Kind.FORWARD, name, f"{name} forward", forward)
                rank.end()
                work(rank, Kind.PHASE, "loss", "loss", MS // 5)
                rank.begin(Kind.PHASE, "backward")
                for name, (_, backward) in reversed(LAYERS.items()):
                    work(rank, Kind.BACKWARD, name, f"{name} backward", backward)
                    if name != "conv2":
                        rank.run(Kind.CALL, "iallreduce", 10_000, nbytes=3000, bucket=name == "fc")
                rank.end()
            for bucket in (1, 0):
                for rank in all_ranks:
                    rank.begin(Kind.PHASE, "exchange", bucket=bucket)
                if messages:
                    _ring(all_ranks, latency, bucket)
                else:
                    arrived = max(rank.now for rank in all_ranks) + latency
                    for rank in all_ranks:
                        wait_for(rank, "iallreduce", bucket, [arrived])
                for rank in all_ranks:
                    rank.end()
                    work(rank, Kind.PHASE, "update", "update", MS // 2, bucket=bucket)
            for rank in all_ranks:
                rank.end()
        for rank in all_ranks if whole else []:
            rank.end(memory=0)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in all_ranks:
        _write(folder, rank, ranks, skew)
    return all_ranks


def _ring(ranks: list[Rank], latency: int, bucket: int) -> None:
    """Two rounds in which each rank sends to the next one."""
    size, nbytes = len(ranks), 1500
    for rank in ranks:
        rank.begin(Kind.WAIT, "iallreduce", bucket=bucket)
    for _ in range(2 if size > 1 else 0):
        posted = [rank.now for rank in ranks]
        for rank in ranks:
            before, after = (rank.rank - 1) % size, (rank.rank + 1) % size
            rank.now = max(posted[rank.rank], posted[before]) + latency
            for kind, peer, stop in (
                (Kind.SENT, after, posted[rank.rank] + latency),
                (Kind.RECEIVED, before, rank.now),
            ):
                start = posted[rank.rank]
                more = {"peer": peer, "tag": bucket, "nbytes": nbytes}
                rank.other(kind, "world", start, stop - start, **more)
    for rank in ranks:
        rank.end()


def _write(folder: Path, rank: Rank, size: int, skew: bool) -> None:
    records = np.array(rank.records, RECORD)
    clock = {"offset": 0, "drift": 0.0, "origin": 1000 * MS, "error": 500}
    if skew and rank.rank:
        clock |= {"offset": 12_345_678 * rank.rank, "drift": 1e-5 * rank.rank}
        stops = _skewed(records["start"] + records["duration"], clock)
        records["start"] = _skewed(records["start"], clock)
        records["duration"] = stops - records["start"]
    about = {
        "rank": rank.rank,
        "size": size,
        "host": f"node{rank.rank // 2}",
        "pid": 100 + rank.rank,
        "lanes": ["main", "loader 0"],
        "command": "python train.py",
        "clock": clock,
        "sent": rank.sent,
        "layers": {
            name: {
                "type": "Linear",
                "parameters": 100,
                "forward_flops": 2 * forward,
                "backward_flops": 4 * forward,
                "forward_bytes": forward,
                "backward_bytes": 2 * forward,
            }
            for name, (forward, _) in LAYERS.items()
        },
        "machine": {"cpu": "test"},
    }
    write_trace(folder, records, list(rank.names), about)


def _skewed(times: np.ndarray, clock: dict[str, float]) -> np.ndarray:
    """Times of a rank's clock for times of rank 0's."""
    elapsed = (times - clock["origin"] + clock["offset"]) / (1 - clock["drift"])
    return np.rint(clock["origin"] + elapsed).astype("i8")
