"""Times of closed formulas on a network, to compare them with replays of schedules."""

from __future__ import annotations

from math import ceil

from pydtnn.comm.schedules.executor import ACTIVE, pieces
from pydtnn.comm.schedules.network import Network
from pydtnn.tools.perfmodel.formulas import Links, Placed, Placement, phases


def links_of(network: Network) -> Links:
    """Return the links of a network of equal hosts: the slowest of each kind."""
    inside = [route for (g, h), route in network.routes.items() if g == h]
    between = [route for (g, h), route in network.routes.items() if g != h] or inside
    inside = inside or between
    shared = [network.links[link] for route in inside for link in route.links]
    cards = [network.links[link] for route in between for link in route.links]
    return Links(
        latency=max(route.latency for route in between),
        bandwidth=min(route.bandwidth for route in between),
        card=min(cards, default=float("inf")),
        local_latency=max(route.latency for route in inside),
        local_bandwidth=min(route.bandwidth for route in inside),
        local_capacity=min(shared, default=float("inf")),
        add=network.add,
    )


def seconds(
    placed: Placed,
    nbytes: float,
    links: Links,
    group: Placement,
    *,
    chunked: bool = False,
) -> float:
    """Return the time of an operation, in s.

    Parameters
    ----------
    placed, nbytes, links, group
        See `phases`.
    chunked : bool
        Whether the array is cut into chunks that are in progress at the same time, as by the
        executor of schedules. With K chunks, A of them in progress, a chunk whose latencies take l,
        transfers b and work a finishes after t = l + b + a, and further ones follow after
        max(b, a, t / A); without work, chunks remain in step, and K chunks take
        ceil(K / A) l + K b. Chunks of a tree overlap more, up and down: at most 20 % less time.
    """
    chunks = pieces(round(nbytes)) if chunked else 1
    parts = phases(placed, nbytes / chunks, links, group)
    first = sum(part.seconds for part in parts)
    if chunks == 1:
        return first
    active = 1 if group.hosts == 1 else ACTIVE
    latency, moving, working = (
        sum(values) for values in zip(*(part[1:] for part in parts), strict=True)
    )
    if not working:
        return ceil(chunks / active) * latency + chunks * moving
    return first + (chunks - 1) * max(moving, working, first / active)
