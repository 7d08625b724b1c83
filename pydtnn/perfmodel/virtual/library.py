"""Times of the collectives of an MPI library, by closed formulas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, log2

from pydtnn.comm.schedules.network import Network
from pydtnn.comm.schedules.steps import doublings

VOLUME = {"allreduce": 2.0, "reduce_scatter": 1.0, "allgather": 1.0, "broadcast": 1.0}
"""How many times (P - 1) / P of the bytes of the array pass the slowest route; others pass none."""


def library_seconds(kind: str, nbytes: int, network: Network, members: Sequence[int]) -> float:
    """Return the time of a collective call after the last rank has joined, in s.

    It consists of the latencies of a tree, and the time of the bytes on the slowest route.

    Parameters
    ----------
    kind : str
        Name of the call.
    nbytes : int
        Length of the whole array, in B.
    network : Network
    members : sequence of int
        The ranks of the group.
    """
    ranks = len(members)
    if ranks == 1:
        return 0.0
    first = [*{network.hosts[rank]: rank for rank in reversed(members)}.values()][::-1]
    if len(first) == 1:
        first = [*members[:2]]
    tree = ((first[0], first[distance]) for distance in doublings(len(first)))
    routes = [network.route(*pair) for pair in (*pairwise(first), *tree)]
    latency = max(route.latency for route in routes)
    bandwidth = min(route.bandwidth for route in routes)
    return latency * ceil(log2(ranks)) + volume(kind, nbytes, ranks) / bandwidth


def volume(kind: str, nbytes: int, ranks: int) -> float:
    """Return the bytes of a call that pass the slowest route."""
    return VOLUME.get(kind, 0.0) * nbytes * (ranks - 1) / ranks
