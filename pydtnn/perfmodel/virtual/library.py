"""Times of the collectives of an MPI library, by closed formulas."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from math import ceil, log2

from pydtnn.perfmodel.engine.engine import Engine

VOLUME = {"allreduce": 2.0, "reduce_scatter": 1.0, "allgather": 1.0, "broadcast": 1.0}
"""How many times (P - 1) / P of the bytes of the array pass the slowest route; others pass none."""


def library_times(
    kind: str,
    nbytes: int,
    joined: Sequence[float],
    hosts: Sequence[Hashable],
    engine: Engine,
) -> list[float]:
    """Return the time at which each rank leaves a collective call, in s.

    All ranks leave together: latencies of a tree after the last rank has joined, and the time of
    the bytes on the slowest route.

    Parameters
    ----------
    kind : str
        Name of the call.
    nbytes : int
        Length of the whole array, in B.
    joined : sequence of float
        Time at which each rank has called, in s.
    hosts : sequence of hashable
        The host of each rank.
    engine : Engine
    """
    ranks = len(hosts)
    start = max(joined)
    if ranks == 1:
        return [start]
    names = list(dict.fromkeys(hosts))
    pairs = pairwise(names) if len(names) > 1 else [(names[0], names[0])]
    routes = [engine.network.routes[pair] for pair in pairs]
    latency = max(route.latency for route in routes)
    bandwidth = min(route.bandwidth for route in routes)
    passed = volume(kind, nbytes, ranks) / bandwidth
    return [start + latency * ceil(log2(ranks)) + passed] * ranks


def volume(kind: str, nbytes: int, ranks: int) -> float:
    """Return the bytes of a call that pass the slowest route."""
    return VOLUME.get(kind, 0.0) * nbytes * (ranks - 1) / ranks
