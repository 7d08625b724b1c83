"""Symbolic execution of a schedule: on sets of contributions, text, or any values with a sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeVar

from pydtnn.comm.schedules.steps import ALL, Part
from pydtnn.comm.schedules.timeline import Event, Message, Timeline

V = TypeVar("V")
"""Type of the symbolic value of a chunk."""


def carry_out(
    done: Timeline, values: list[list[V]], add: Callable[[Message, Part, V, V], V]
) -> Iterator[Event]:
    """Carry out a schedule in place.

    Parameters
    ----------
    done : Timeline
        The schedule.
    values : list of lists
        For each rank, the symbolic value of each of the `Timeline.chunks`.
    add : callable
        Returns a sum: ``add(message, chunk, existing value, received value)``.

    Yields
    ------
    Event
        Each beginning and end of a round, after its effect on the values.
    """
    pieces = done.chunks
    first = {piece.start: i for i, piece in enumerate(pieces)} | {ALL.stop: len(pieces)}
    sent, received = defaultdict(list), defaultdict(list)
    for message in done.messages:
        sent[message.sender, message.sent].append(message)
        received[message.receiver, message.received].append(message)
    travelling: dict[Message, list[V]] = {}
    for event in done.events:
        mine, place = values[event.rank], (event.rank, event.round)
        if event.begins:
            for message in sent[place]:
                travelling[message] = mine[first[message.part.start] : first[message.part.stop]]
        else:
            for message in received[place]:
                for i, value in enumerate(travelling[message], first[message.part.start]):
                    summed = message.op == "sum"
                    mine[i] = add(message, pieces[i], mine[i], value) if summed else value
        yield event
