"""Clocks of ranks: their offset from the clock of rank 0, by ping-pong.

Rank 0 sends a message to each other rank in turn, which answers with the time of its clock. If both
ways take the same time, the answer was sent in the middle between sending and receiving; whatever
they take, the error is at most half of the round trip. The shortest of many round trips is used.
Ranks of one host have the same clock, and therefore the reading of the first of them, unless their
own contradicts it.

References
----------
Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pydtnn.comm import Communicator, Request
from pydtnn.utils import clock

ROUNDS = 200
"""Round trips with each rank."""

TAG = 32_000
"""Tag of the messages."""

PAUSE = 5e-4
"""Time between two tests of a rank that waits until it is its turn, in s."""


@dataclass(frozen=True)
class Reading:
    """A comparison of this rank's clock with that of rank 0.

    Attributes
    ----------
    time : int
        When it was made, in ns of this rank's clock.
    offset : int
        This clock minus that of rank 0, in ns.
    error : int
        Largest error of the offset, in ns.
    """

    time: int
    offset: int
    error: int


def read_clock(comm: Communicator) -> Reading:
    """Compare the clocks of all ranks with that of rank 0. Collective: all ranks call it.

    Ranks wait without using a core, so that the round trips of others are short. Virtual ranks read
    one clock and send nothing.
    """
    if clock.current().common:
        return Reading(clock.now_ns(), 0, 0)
    if comm.rank > 0:
        own = _answer(comm)
    else:
        for rank in range(1, comm.size):
            comm.send(_measure(comm, rank), rank, TAG)
        own = Reading(clock.now_ns(), 0, 0)
    first = comm.gather_object(own)[comm.hosts[comm.rank]]
    return first if abs(own.offset - first.offset) <= own.error + first.error else own


def _measure(comm: Communicator, rank: int) -> np.ndarray:
    """Return time, offset and error of another rank's clock."""
    ping, pong = np.zeros(1, "i8"), np.zeros(1, "i8")
    best, shortest = np.zeros(3, "i8"), 0
    for number in range(ROUNDS):
        arrival = comm.irecv(pong, rank, TAG)
        sent = clock.now_ns()
        comm.send(ping, rank, TAG)
        arrival.wait()
        taken = clock.now_ns() - sent
        if number == 0 or taken < shortest:
            shortest = taken
            best[:] = pong[0], pong[0] - (sent + taken // 2), taken // 2 + 1
    return best


def _answer(comm: Communicator) -> Reading:
    ping, pong = np.zeros(1, "i8"), np.zeros(1, "i8")
    for number in range(ROUNDS):
        arrival = comm.irecv(ping, 0, TAG)
        if number == 0:
            _wait_patiently(arrival)
        arrival.wait()
        pong[0] = clock.now_ns()
        comm.send(pong, 0, TAG)
    result = np.zeros(3, "i8")
    comm.recv(result, 0, TAG)
    return Reading(*map(int, result))


def _wait_patiently(request: Request) -> None:
    while not request.test():
        time.sleep(PAUSE)


def describe_clock(start: Reading, stop: Reading | None) -> dict[str, float]:
    """Return the entry "clock" of a trace: see `pydtnn.tracing.records.RankTrace`.

    Parameters
    ----------
    start, stop : Reading
        At the start and at the end of the run. Without the latter the drift is taken to be 0.
    """
    drift, error = 0.0, start.error
    if stop is not None and stop.time > start.time:
        drift = (stop.offset - start.offset) / (stop.time - start.time)
        error = max(error, stop.error)
    return {"offset": start.offset, "drift": drift, "origin": start.time, "error": error}
