"""Times of the collectives of an MPI library, by closed formulas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pydtnn.comm.schedules.network import Network
from pydtnn.comm.schedules.steps import doublings
from pydtnn.perfmodel.formulas import library_terms


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
    terms = library_terms(kind, len(members))
    if not terms.rounds:
        return 0.0
    first = [*{network.hosts[rank]: rank for rank in reversed(members)}.values()][::-1]
    if len(first) == 1:
        first = [*members[:2]]
    tree = ((first[0], first[distance]) for distance in doublings(len(first)))
    routes = [network.route(*pair) for pair in (*pairwise(first), *tree)]
    latency = max(route.latency for route in routes)
    return terms.rounds * latency + terms.sent * nbytes / min(route.bandwidth for route in routes)
