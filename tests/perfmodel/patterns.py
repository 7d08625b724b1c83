"""Communication patterns as schedules, by which predictions are compared with SimGrid."""

from __future__ import annotations

import random
from math import isqrt

from pydtnn.comm.schedules import SCHEDULES, Algorithm
from pydtnn.comm.schedules.steps import (
    ALL,
    Group,
    Rounds,
    Step,
    doublings,
    part,
    receive,
    send,
)


def alltoall(group: Group) -> Rounds:
    """Pairwise exchange: in round k with the ranks k places away."""
    r, p = group.rank, group.size
    for k in range(1, p):
        yield send((r + k) % p, part(r + k, p)), receive((r - k) % p, part(r, p))


def broadcast(group: Group) -> Rounds:
    """A binomial tree from rank 0."""
    r, p = group.rank, group.size
    for distance in doublings(p):
        if r < distance and r + distance < p:
            yield (send(r + distance, ALL),)
        elif distance <= r < 2 * distance:
            yield (receive(r - distance, ALL),)
        else:
            yield ()


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
        yield tuple(Step(peer, ALL, ALL, "copy") for peer in near)


def pipeline(group: Group) -> Rounds:
    """Eight micro-batches pass from stage to stage."""
    r, p = group.rank, group.size
    for _ in range(8):
        if r:
            yield (receive(r - 1, ALL),)
        if r + 1 < p:
            yield (send(r + 1, ALL),)


def incast(group: Group) -> Rounds:
    """Rank 0 receives from all others at once, as a parameter server."""
    r, p = group.rank, group.size
    yield tuple(receive(k, ALL) for k in range(1, p)) if r == 0 else (send(0, ALL),)


def permutation(group: Group) -> Rounds:
    """Four random permutations: each rank sends to one, and receives from one."""
    r, p = group.rank, group.size
    rng = random.Random(p)
    for _ in range(4):
        order = rng.sample(range(p), p)
        place = order.index(r)
        yield send(order[(place + 1) % p], ALL), receive(order[place - 1], ALL)


PATTERNS: dict[str, Algorithm] = {
    "ring": SCHEDULES["ring"],
    "recursive doubling": SCHEDULES["recursive_doubling"],
    "Rabenseifner": SCHEDULES["halving_doubling"],
    "hierarchical": SCHEDULES["hierarchical"],
    "all-to-all": alltoall,
    "broadcast": broadcast,
    "halo": halo,
    "pipeline": pipeline,
    "incast": incast,
    "random permutation": permutation,
}
"""Patterns by name; the first four are sums of the library."""
