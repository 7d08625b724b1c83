"""The network of a job, and the time of a rank's processor for its messages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.schedules.network import Network, Route
from pydtnn.perfmodel.platform import Link, Messages

LONG = 1 << 20
"""Length of messages that measure the copies of the processor, in B."""

REPEATS = 15
"""Repetitions, of which the median is used."""

LEAST = 0.05
"""Share of a transfer's time from which a processor's part in it counts."""


def measure_messages(comm: Communicator, default: Messages) -> tuple[Messages, list[str]]:
    """Measure messages between the ranks of a job. Collective: all ranks call it.

    Parameters
    ----------
    comm : Communicator
    default : Messages
        Taken where nothing can be measured: inside a host with one rank, between hosts with one
        host.

    Returns
    -------
    Messages
        Equal on all ranks.
    list of str
        What was not measured.
    """
    network = Network.measure(comm)
    add = 1 / network.add if network.add > 0 else None
    inside = _routes(network, same=True)
    between = _routes(network, same=False)
    call, copy = processor(comm) if comm.size > 1 else (default.call, default.copy)
    links = {
        "inside": _link(network, inside, "inside", default.inside),
        "between": _link(network, between, "from", default.between),
    }
    missing = [f"messages.{n}" for n, own in zip(links, (inside, between), strict=True) if not own]
    if comm.size == 1:
        missing += ["messages.call", "messages.copy"]
    return Messages(links["inside"], links["between"], add, copy, call), missing


def _routes(network: Network, *, same: bool) -> list[Route]:
    return [route for (g, h), route in network.routes.items() if (g == h) is same]


def _link(network: Network, routes: Sequence[Route], shared: str, default: Link) -> Link:
    if not routes:
        return default
    capacities = [rate for name, rate in network.links.items() if name.startswith(f"{shared} ")]
    return Link(
        statistics.median(route.latency for route in routes),
        statistics.median(route.bandwidth for route in routes),
        statistics.median(capacities) if capacities else None,
    )


def processor(comm: Communicator) -> tuple[float, float | None]:
    """Measure what messages cost a rank that computes while they travel.

    Each rank starts to send to the next one and to receive from the one before, computes for longer
    than the transfer, and waits. What this takes longer than the computation is the time of its
    processor. Collective.

    Returns
    -------
    float
        Time per message, in s.
    float or None
        Rate at which the processor copies bytes, in B/s; None if it takes no part in transfers.
    """
    short = _overhead(comm, 1)
    extra = max(_overhead(comm, LONG) - short, 0.0)
    transfer = _ring(comm, LONG, 0.0)
    found = (short / 2, extra / (2 * LONG) if extra > LEAST * transfer else 0.0)
    call, copy = (statistics.median(own) for own in zip(*comm.gather_object(found), strict=True))
    return call, 1 / copy if copy > 0 else None


def _overhead(comm: Communicator, length: int) -> float:
    """Return the extra time of a rank that computes while messages of a length travel, in s."""
    work = 3 * _ring(comm, length, 0.0) + 1e-4
    return max(_ring(comm, length, work) - work, 0.0)


def _ring(comm: Communicator, length: int, work: float) -> float:
    """Return the median time of a message to the next rank, with `work` s of computation."""
    outgoing, incoming = np.ones(length, "uint8"), np.empty(length, "uint8")
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    times = []
    for _ in range(REPEATS + 1):
        comm.barrier()
        start = time.perf_counter()
        requests = [comm.irecv(incoming, source), comm.isend(outgoing, to)]
        begun = time.perf_counter()
        while time.perf_counter() - begun < work:
            pass
        for request in requests:
            request.wait()
        times.append(time.perf_counter() - start)
    return float(statistics.median(comm.gather_object(statistics.median(times[1:]))))
