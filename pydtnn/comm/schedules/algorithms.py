"""The allreduce algorithms of the literature, as schedules.

In what follows P is the number of ranks and n the bytes of the array; "sends" is the number of
bytes that the busiest rank sends in all rounds together. No algorithm sends less than
2 (P-1)/P n, and with one message at a time none needs fewer than log2 P rounds. The first bound
matters for long arrays, the second for short ones, and no algorithm attains both; hence several
algorithms are provided.
"""

from __future__ import annotations

from functools import partial
from math import isqrt

from pydtnn.comm.schedules.steps import (
    ALL,
    Group,
    Round,
    Rounds,
    add,
    back,
    doublings,
    fold,
    halved,
    over,
    part,
    power_of_two,
    receive,
    send,
    together,
)


def ring(group: Group) -> Rounds:
    """Pass partial sums around a ring until each rank has one total, then pass the totals around.

    2 (P-1) rounds; sends 2 (P-1)/P n, which is the minimum, to one neighbour only.

    References
    ----------
    Patarasuk, Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    yield from ring_reduce_scatter(group)
    yield from ring_allgather(group)


def ring_reduce_scatter(group: Group) -> Rounds:
    """First half of `ring`: rank r ends with the sum of part r of P."""
    r, p = group.rank, group.size
    for k in range(1, p):
        yield send((r + 1) % p, part(r - k, p)), add((r - 1) % p, part(r - k - 1, p))


def ring_allgather(group: Group) -> Rounds:
    """Second half of `ring`: part r is sent from rank r to all ranks."""
    r, p = group.rank, group.size
    for k in range(p - 1):
        yield send((r + 1) % p, part(r - k, p)), receive((r - 1) % p, part(r - k - 1, p))


def bidirectional_ring(group: Group) -> Rounds:
    """Run two rings at once: one half of the array clockwise, the other half counterclockwise.

    2 (P-1) rounds; sends 2 (P-1)/P n, half of it to each neighbour: twice as fast as `ring` if the
    links to both neighbours are independent.

    References
    ----------
    Jain, Sabharwal, Optimal bucket algorithms for large MPI collectives on torus interconnects,
    2010, which use all directions of a torus at once.
    """
    clockwise = range(group.size)
    yield from together(
        over(group, clockwise, ring, part(0, 2)),
        over(group, clockwise[::-1], ring, part(1, 2)),
    )


@fold
def recursive_doubling(group: Group) -> Rounds:
    """Add whole arrays between ranks at distance 1, 2, 4, ...: all have the sum after log2 P.

    log2 P rounds; sends n log2 P: the fastest for short messages. See `fold` for P that is not a
    power of two.

    References
    ----------
    Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH,
    2005.
    """
    for distance in doublings(group.size):
        peer = group.rank ^ distance
        yield send(peer, ALL), add(peer, ALL)


@fold
def halving_doubling(group: Group) -> Rounds:
    """Swap halves, quarters, ... until each rank has the sum of one part, then swap them back.

    2 log2 P rounds; sends 2 (P-1)/P n; the longest messages are sent to the nearest ranks. See
    `fold` for P that is not a power of two.

    References
    ----------
    Rabenseifner, Optimization of collective reduction operations, 2004.
    """
    halving = [swap_halves(group.rank, distance) for distance in doublings(group.size)]
    yield from halving
    yield from back(halving)


def swap_halves(rank: int, distance: int) -> Round:
    """Swap halves with the rank at `distance`, a power of two, and add what is received."""
    peer = rank ^ distance
    return send(peer, halved(peer, 2 * distance)), add(peer, halved(rank, 2 * distance))


def binomial_tree(group: Group) -> Rounds:
    """Reduce along a binomial tree to rank 0 and broadcast the sum the same way back.

    2 log2 P rounds, rounded up; rank 0 sends n log2 P. Only 2 (P-1) messages in total, but ranks
    are idle in many rounds.

    References
    ----------
    Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH,
    2005.
    """
    r, p = group.rank, group.size
    up: list[Round] = []
    for distance in doublings(p):
        if r % distance:  # its sum has already been sent to another rank
            break
        if r & distance:
            up += [(send(r - distance, ALL),)]
        elif r + distance < p:
            up += [(add(r + distance, ALL),)]
    yield from up
    yield from back(up)


def fixed_tree(group: Group) -> Rounds:
    """Sum every element in one binary tree over the ranks, for any number of ranks.

    The tree is ((0 + 1) + (2 + 3)) + ((4 + 5) + ...): aligned blocks of 1, 2, 4, ... ranks, the
    last of which may be short. All elements on all ranks are rounded alike, so that the same
    contributions give the same bytes even where several ranks are merged into one. The sums of
    each block are distributed over its ranks. Two full blocks swap halves, as in
    `halving_doubling`; a short block sends its sums to the full block on its left.

    2 log2 P rounds, rounded up; sends 2 (P-1)/P n if P is a power of two, otherwise at most 2 n.
    """
    r, p = group.rank, group.size
    up: list[Round] = []
    for block in doublings(p):
        left = r - r % (2 * block)
        right = left + block
        if right + block <= p:
            up += [swap_halves(r, block)]
        elif right < p:
            holders = power_of_two(p - right)
            if r < right:
                up += [(add(right + r % holders, halved(r, block)),)]
            elif r < right + holders:
                heirs = range(r % holders, block, holders)
                up += [tuple(send(left + heir, halved(heir, block)) for heir in heirs)]
    yield from up
    yield from back(up)


def direct(group: Group) -> Rounds:
    """Send part r of the array directly to rank r, sum it there, and send the sum directly back.

    2 rounds; sends 2 (P-1)/P n in 2 (P-1) messages: the minimum number of rounds for this volume.
    For few ranks, or a network that transfers messages between all pairs concurrently.

    References
    ----------
    Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH,
    2005: their pairwise exchange, with all pairs in one round.
    """
    scatter = list(direct_reduce_scatter(group, group.size))
    yield from scatter
    yield from back(scatter)


def direct_reduce_scatter(group: Group, parts: int) -> Rounds:
    """First half of `direct` with any number of parts, assigned to the ranks round-robin."""
    r, p = group.rank, group.size
    others = [rank % p for rank in range(r + 1, r + p)]
    yield (
        *(send(to, part(j, parts)) for to in others for j in range(to, parts, p)),
        *(add(source, part(j, parts)) for j in range(r, parts, p) for source in others),
    )


def torus(group: Group) -> Rounds:
    """Arrange the ranks in a grid: reduce-scatter along rows, ring along columns, and back.

    2 (R-1) + 2 (C-1) rounds on R rows of C ranks, with R C = P as near to a square as possible (one
    row if P is prime); sends 2 (P-1)/P n. Far fewer rounds than `ring`, still between neighbours.

    References
    ----------
    Mikami, Suganuma, U-chupala, Tanaka, Kageyama, Massively distributed SGD: ImageNet/ResNet-50
    training in a flash, 2018; Ying, Kumar, Chen, Wang, Cheng, Image classification at supercomputer
    scale, 2018.
    """
    r, p = group.rank, group.size
    columns = p // max(rows for rows in range(1, isqrt(p) + 1) if p % rows == 0)
    row = range(r - r % columns, r - r % columns + columns)
    column = range(r % columns, p, columns)
    yield from over(group, row, ring_reduce_scatter)
    yield from over(group, column, ring, part(r % columns, columns))
    yield from over(group, row, ring_allgather)


def hierarchical(group: Group) -> Rounds:
    """Reduce-scatter inside each host, allreduce each part between hosts, allgather inside.

    H hosts of M ranks: 2 rounds inside hosts and, between hosts, those of `halving_doubling` (H a
    power of two) or `ring`; a rank sends 2 (H-1)/H n/M to other hosts, so each element crosses the
    link of a host as often as if the host were a single rank. If hosts have unequal numbers of
    ranks, the array is cut for the largest, and ranks of smaller hosts process several parts.

    References
    ----------
    Cho, Finkler, Kung, Hunter, BlueConnect: decomposing all-reduce for deep learning on
    heterogeneous network hierarchy, 2019; Ueno, Yokota, Exhaustive study of hierarchical allreduce
    patterns for large messages between GPUs, 2019.
    """
    hosts = group.by_host
    parts = max(len(ranks) for ranks in hosts)
    inside = next(ranks for ranks in hosts if group.rank in ranks)
    between = halving_doubling if len(hosts) == power_of_two(len(hosts)) else ring
    scatter = list(over(group, inside, partial(direct_reduce_scatter, parts=parts)))
    holders = [[ranks[j % len(ranks)] for ranks in hosts] for j in range(parts)]  # of part j
    yield from scatter
    yield from together(*(over(group, holders[j], between, part(j, parts)) for j in range(parts)))
    yield from back(scatter)
