"""Communication graphs of decentralised schemes, in which all ranks have equal roles.

A graph is a function of the number of ranks and the step that returns hops: rank r sends to rank r
+ hop. Each rank then computes the mean of its own and the received values: a circulant matrix with
equal weights, with rows and columns that sum to 1. The mean over all ranks is preserved exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.layers.parameters import Bucket

Topology = Callable[[int, int], Sequence[int]]


def ring(size: int, step: int) -> list[int]:
    """Send to both neighbours.

    >>> ring(5, 0), ring(2, 0), ring(1, 0)
    ([1, 4], [1], [])
    """
    return sorted({1, size - 1} - {0, size})


def exponential(size: int, step: int) -> list[int]:
    """Send to the ranks at distances 1, 2, 4, 8, ... (Ying et al. 2021, section 3).

    >>> exponential(6, 0), exponential(1, 0)
    ([1, 2, 4], [])
    """
    return [1 << k for k in range((size - 1).bit_length())]


def one_peer(size: int, step: int) -> list[int]:
    """Send to one rank per step: those of `exponential` in turn.

    If P is a power of 2, log2(P) steps compute an exact average (Assran et al. 2019, appendix A;
    Ying et al. 2021, section 4).

    >>> [one_peer(6, step) for step in range(4)]
    [[1], [2], [4], [1]]
    """
    hops = exponential(size, step)
    return [hops[step % len(hops)]] if hops else []


def complete(size: int, step: int) -> list[int]:
    """Send to all ranks: one step computes an exact average, at the highest cost."""
    return list(range(1, size))


GRAPHS: dict[str, Topology] = {
    "ring": ring,
    "exponential": exponential,
    "one_peer": one_peer,
    "complete": complete,
}
"""Graphs by name."""


def swap(
    comm: Communicator, buckets: Sequence[Bucket], hops: Sequence[int]
) -> Iterator[tuple[Bucket, list[np.ndarray]]]:
    """Send all parameters along the hops; yield each bucket with the received values.

    Collective: all ranks call it. A bucket's values may be modified once it is yielded.
    """
    received = [[np.empty_like(bucket.values) for _ in hops] for bucket in buckets]
    sources, targets = ([(comm.rank + sign * hop) % comm.size for hop in hops] for sign in (-1, 1))
    requests = [
        comm.exchange(
            [(bucket.values, to) for to in targets], list(zip(arrays, sources, strict=True))
        )
        for bucket, arrays in zip(buckets, received, strict=True)
    ]
    for bucket, arrays, request in zip(buckets, received, requests, strict=True):
        request.wait()
        yield bucket, arrays
