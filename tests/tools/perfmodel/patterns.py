"""Communication patterns as schedules, by which predictions are compared with SimGrid."""

from __future__ import annotations

from math import isqrt

from pydtnn.comm.schedules import SCHEDULES, Algorithm
from pydtnn.comm.schedules.steps import ALL, Group, MessageStep, Rounds, part, receive, send


def alltoall(group: Group) -> Rounds:
    """Pairwise exchange: in round k with the ranks k places away."""
    r, p = group.rank, group.size
    for k in range(1, p):
        yield send((r + k) % p, part(r + k, p)), receive((r - k) % p, part(r, p))


def halo(group: Group) -> Rounds:
    """Both neighbours in a grid of ranks, along each of its two dimensions."""
    r, p = group.rank, group.size
    rows = max(k for k in range(1, isqrt(p) + 1) if p % k == 0)
    columns = p // rows
    row, column = divmod(r, columns)
    for near in (
        [row * columns + (column + by) % columns for by in (1, -1)],
        [(row + by) % rows * columns + column for by in (1, -1)],
    ):
        yield tuple(MessageStep(peer, ALL, ALL, "copy") for peer in near)


def incast(group: Group) -> Rounds:
    """Rank 0 receives from all others at once, as a parameter server."""
    r, p = group.rank, group.size
    yield tuple(receive(k, ALL) for k in range(1, p)) if r == 0 else (send(0, ALL),)


PATTERNS: dict[str, Algorithm] = {
    "ring": SCHEDULES["ring"],
    "recursive doubling": SCHEDULES["recursive_doubling"],
    "Rabenseifner": SCHEDULES["halving_doubling"],
    "hierarchical": SCHEDULES["hierarchical"],
    "all-to-all": alltoall,
    "halo": halo,
    "incast": incast,
}
"""Patterns by name; the first four are sums of the library."""
