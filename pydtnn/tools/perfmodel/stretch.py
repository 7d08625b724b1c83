"""How much longer messages take on a topology than between hosts at one switch.

Closed formulas know the latency and the bandwidth of a message and the network card of a host. On a
topology the messages of a round have further latencies, and meet on links between switches: the
busiest link determines the time of a round. Both are counted here, once for each pattern of
messages, for all groups along an axis of the mesh at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from pydtnn.comm.schedules import SCHEDULES, Algorithm
from pydtnn.comm.schedules.algorithms import halving_doubling, ring
from pydtnn.comm.schedules.network import Network
from pydtnn.comm.schedules.steps import ALL, Group, Rounds, Step, over, part, receive, send
from pydtnn.tools.perfmodel.engine.rows import messages_by_row
from pydtnn.tools.perfmodel.formulas import PLAIN, Stretch
from pydtnn.tools.perfmodel.platform import Link, Platform
from pydtnn.tools.perfmodel.topology import Topology


def neighbours(group: Group) -> Rounds:
    """Messages to both neighbours in a line of ranks, as those of halos."""
    near = [k for k in (group.rank - 1, group.rank + 1) if 0 <= k < group.size]
    yield tuple(Step(peer, ALL, ALL, "copy") for peer in near)


def to_next(group: Group) -> Rounds:
    """A message to the next rank, as those of the stages of a pipeline."""
    r, p = group.rank, group.size
    yield (
        *(send(k, ALL) for k in (r + 1,) if k < p),
        *(receive(k, ALL) for k in (r - 1,) if k >= 0),
    )


def to_all(group: Group) -> Rounds:
    """A message to each other rank."""
    r, p = group.rank, group.size
    others = [k for k in range(p) if k != r]
    yield (*(send(k, part(k, p)) for k in others), *(receive(k, part(r, p)) for k in others))


def leaders(group: Group) -> Rounds:
    """An allreduce of the first ranks of all hosts."""
    first = [ranks[0] for ranks in group.by_host]
    odd = len(first) & (len(first) - 1)  # not a power of two
    yield from over(group, first, ring if odd else halving_doubling)


OWN: tuple[Any, ...] = (neighbours, to_next, to_all, leaders)

PATTERNS: dict[str, Algorithm] = {**SCHEDULES, **{one.__name__: one for one in OWN}}
"""Patterns of messages by name."""


def stretch(pattern: str, platform: Platform, total: int, ranks: int, stride: int) -> Stretch:
    """Return the factors for groups of ranks that communicate at the same time.

    Parameters
    ----------
    pattern : str
        A name of `PATTERNS`.
    platform : Platform
    total : int
        Ranks of the job.
    ranks, stride : int
        Ranks of a group, and the distance between them.
    """
    if platform.topology is None and platform.messages.rails == 1:
        return PLAIN
    hosts = platform.hosts(total)
    between, rails = platform.between(total), platform.messages.rails
    return _stretch(pattern, hosts, platform.topology, rails, between, ranks, stride)


@cache
def _stretch(
    pattern: str,
    hosts: tuple[int, ...],
    topology: Topology | None,
    rails: int,
    link: Link,
    ranks: int,
    stride: int,
) -> Stretch:
    start = np.arange(len(hosts)).reshape(-1, ranks, stride)  # groups, ranks, groups
    members = start.transpose(0, 2, 1).reshape(-1, ranks)
    rows = messages_by_row(PATTERNS[pattern], [hosts[rank] for rank in members[0].tolist()])
    numbers = {"latency": link.latency, "bandwidth": link.bandwidth, "card": link.shared}
    times = []
    for further in ({}, {"topology": topology, "rails": rails}):
        network = Network.create(hosts, **numbers, **further)  # type: ignore[arg-type]
        known: dict[tuple[bytes, ...], tuple[float, float]] = {}
        total = np.zeros(2)
        for senders, receivers, shares, _ in rows:
            key = senders.tobytes(), receivers.tobytes(), shares.tobytes()
            if key not in known:
                ends = (members[:, one].ravel().tolist() for one in (senders, receivers))
                pairs = zip(*ends, strict=True)
                known[key] = _row(network, pairs, np.tile(shares, len(members)))
            total += known[key]
        times.append(total)
    plain, found = times
    return Stretch(*(f / p if p else 1.0 for p, f in zip(plain, found, strict=True)))


def _row(
    network: Network, pairs: Iterable[tuple[int, ...]], shares: np.ndarray
) -> tuple[float, float]:
    """Return the longest latency, and the time of the busiest link, between hosts."""
    latency = longest = 0.0
    loads: Counter[str] = Counter()
    for (sender, receiver), share in zip(pairs, shares.tolist(), strict=True):
        if network.hosts[sender] != network.hosts[receiver]:
            route = network.route(sender, receiver)
            latency = max(latency, route.latency)
            longest = max(longest, share / route.bandwidth)
            for name in route.links:
                loads[name] += share
    busiest = max((load / network.links[name] for name, load in loads.items()), default=0.0)
    return latency, max(longest, busiest)
