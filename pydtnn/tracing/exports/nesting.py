"""Beginnings and ends of the activities of a thread, in the order of time."""

from __future__ import annotations

from collections.abc import Iterator

from pydtnn.tracing.timeline import Activity, Timeline


def threads(timeline: Timeline) -> list[tuple[int, int]]:
    """Return (rank, number of the thread) of all threads."""
    return [(rank, lane) for rank, lanes in enumerate(timeline.lanes) for lane in range(len(lanes))]


def thread_name(timeline: Timeline, rank: int, lane: int) -> str:
    """Return the name of a thread, unique among all ranks."""
    return f"rank {rank} {timeline.lanes[rank][lane]}"


def transitions(timeline: Timeline, rank: int, lane: int) -> Iterator[tuple[int, Activity, bool]]:
    """Yield the beginnings and ends of a thread's activities, which are properly nested.

    Yields
    ------
    int
        Time in ns, ascending.
    Activity
    bool
        Whether the activity begins.
    """
    open_rows: list[Activity] = []
    for row in timeline.rows(timeline.select(rank=rank, lane=lane)):
        while open_rows and open_rows[-1].depth >= row.depth:
            last = open_rows.pop()
            yield last.stop, last, False
        open_rows.append(row)
        yield row.start, row, True
    while open_rows:
        last = open_rows.pop()
        yield last.stop, last, False
