"""Beginnings and ends of the activities of a thread, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator

from pydtnn.tracing.timeline import Timeline


def threads(timeline: Timeline) -> list[tuple[int, int]]:
    """Return (rank, number of the thread) of all threads."""
    return [(rank, lane) for rank, lanes in enumerate(timeline.lanes) for lane in range(len(lanes))]


def thread_name(timeline: Timeline, rank: int, lane: int) -> str:
    """Return the name of a thread, unique among all ranks."""
    return f"rank {rank} {timeline.lanes[rank][lane]}"


def transitions(timeline: Timeline, rank: int, lane: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the beginnings and ends of a thread's activities, which are properly nested.

    Yields
    ------
    int
        Time in ns, ascending.
    int
        Position in `Timeline.activities`.
    bool
        Whether the activity begins.
    """
    chosen = timeline.select(rank=rank, lane=lane)
    rows = timeline.activities[chosen]
    depths, starts = rows["depth"].tolist(), rows["start"].tolist()
    stops = rows["stop"].tolist()
    open_rows: list[int] = []
    for i, position in enumerate(chosen.tolist()):
        while open_rows and depths[open_rows[-1]] >= depths[i]:
            last = open_rows.pop()
            yield stops[last], int(chosen[last]), False
        open_rows.append(i)
        yield starts[i], position, True
    while open_rows:
        last = open_rows.pop()
        yield stops[last], int(chosen[last]), False
