"""The network of a job, and the time of a rank's processor for its messages."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.tools.perfmodel.calibration.processor import exchange_around, measure_processor
from pydtnn.tools.perfmodel.calibration.sample import Sample, sample
from pydtnn.tools.perfmodel.platform import Link, MessageSpeed
from pydtnn.utils import clock

LONG = 2**20
"""Size of the messages that measure bandwidth, in B."""

REPEATS = 5
"""Repetitions of each measurement, after one warm-up that opens connections; the median is used."""


def measure_messages(comm: Communicator, default: MessageSpeed) -> tuple[MessageSpeed, list[str]]:
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
    inside, between = measure_links(comm)
    add, processor = measure_addition(comm), measure_processor(comm, between)
    links = {"inside": inside or default.inside, "between": between or default.between}
    if processor.wake is not None:  # what the ranks themselves take is counted for each message
        for name, one in links.items():
            late = processor.call + processor.notice(2 * one.latency)
            links[name] = replace(one, latency=max(one.latency - late, one.latency / 4))
    missing = [
        f"messages.{name}" for name, own in zip(links, (inside, between), strict=True) if not own
    ]
    if comm.size == 1:
        missing += ["messages.call"]
    messages = MessageSpeed(
        links["inside"],
        links["between"],
        add=1 / add if add > 0 else None,
        copy=1 / processor.copy if processor.copy else None,
        call=processor.call if comm.size > 1 else default.call,
        allreduce=1 / processor.add if processor.add else None,
        eager=processor.eager if processor.eager < inf else None,
        wake=processor.wake,
        test=processor.test,
    )
    return messages, missing


def measure_links(comm: Communicator) -> tuple[Link | None, Link | None]:
    """Measure the links inside hosts and between them. Collective: all ranks call it.

    Latency and bandwidth are those of ping-pongs between the first ranks of every two hosts, of
    which disjoint pairs are measured at the same time, and between the first two ranks of each
    host. The capacity of a network card is measured with all ranks of all hosts sending and
    receiving at once; so is that of a host's memory. Emulated hosts share the processors of a
    machine, which may not be able to fill all links at once: a card of theirs has at least the
    bandwidth of a pair of hosts.

    Returns
    -------
    inside, between : Link or None
        Medians, equal on all ranks; None without two ranks of a host, or without two hosts.
    """
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(comm.hosts):
        ranks.setdefault(host, []).append(rank)
    local, hosts = ranks[comm.hosts[comm.rank]], [*ranks]
    own, place = hosts.index(comm.hosts[comm.rank]), local.index(comm.rank)
    sent, received = np.ones((2, LONG), "uint8")

    def write(to: Sequence[int], source: Sequence[int]) -> None:
        comm.exchange([(sent, one) for one in to], [(received, one) for one in source]).wait()

    between, rate = list[tuple[float, float]](), 0.0
    if len(hosts) > 1:
        for pairs in round_robin(hosts):
            comm.barrier()
            for pair in pairs:
                between += _ping(comm, *(ranks[host][0] for host in pair))
        fewest = min(map(len, ranks.values()))
        ends = (ranks[hosts[(own + by) % len(hosts)]][:fewest] for by in (1, -1))
        each = (beside[place : place + 1] for beside in ends)
        rate = fewest * LONG / _together(comm, partial(write, *each))
    machines = {*comm.gather_object((comm.hosts[comm.rank], machine()))}
    emulated = len(machines) > len({name for _, name in machines})
    cards = [(*one, max(rate, one[1] if emulated else 0.0)) for one in between]
    comm.barrier()
    inside = _ping(comm, *local[:2]) if len(local) > 1 else []
    others = local[place + 1 :] + local[:place]
    seconds = _together(comm, partial(write, others[:1], others[-1:]))
    memories = [(*one, len(local) * LONG / seconds) for one in inside]
    return _link(comm, memories), _link(comm, cards)


def _link(comm: Communicator, own: Sequence[tuple[float, ...]]) -> Link | None:
    """Return the medians of what ranks have found, if it is anything."""
    every = [one for found in comm.gather_object(own) for one in found]
    return Link(*map(median, zip(*every, strict=True))) if every else None


def _ping(comm: Communicator, first: int, second: int) -> list[tuple[float, float]]:
    """Measure a ping-pong; return latency and bandwidth, on the rank `first` only."""

    def bounce(array: np.ndarray) -> None:
        if comm.rank == first:
            comm.send(array, second)
            comm.recv(array, second)
        elif comm.rank == second:
            comm.recv(array, first)
            comm.send(array, first)

    calls = (partial(bounce, np.ones(length, "uint8")) for length in (1, LONG))
    found = [sample("messages", call, REPEATS, clock=clock.now).times for call in calls]
    short, long = (median(times) / 2 for times in found)
    bandwidth = LONG / max(long - short, 1e-12)  # clocks may not resolve the difference
    return [(short, bandwidth)] if comm.rank == first else []


def measure_addition(comm: Communicator) -> float:
    """Return the seconds to add a byte of float32 numbers while all ranks add. Collective."""
    x, y = np.ones((2, LONG // 4), "float32")
    return _together(comm, lambda: np.add(x, y, out=y)) / LONG


def _together(comm: Communicator, work: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done their work after a simultaneous start."""
    times = sample("messages", work, REPEATS, comm.barrier, clock.now).times
    return median(map(max, zip(*comm.gather_object(times), strict=True)))


def machine() -> str:
    """Return a name of this machine that network namespaces and containers on it share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()


def round_robin(players: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Pair each rank with every other once, in turns of disjoint pairs (circle method).

    >>> list(round_robin([0, 1, 2]))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    circle: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], circle[: len(circle) // 2 - 1 : -1], strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle.insert(1, circle.pop())


def exchange_sample(comm: Communicator) -> Sample:
    """Time messages of a few bytes between neighbours, to find disturbances. Collective."""
    exchange = partial(exchange_around, comm, np.zeros(8), np.zeros(8))
    return sample("messages", exchange, 40, together=comm.barrier, limit=1.0)
