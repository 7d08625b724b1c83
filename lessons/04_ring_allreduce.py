"""04 Ring allreduce: the sum with the fewest bytes, in 2 (P - 1) rounds.

Cut the array of n elements into P chunks. In each of P - 1 rounds every rank sends one chunk to its
right neighbour and adds the one from the left: afterwards rank r holds the complete sum of one
chunk. P - 1 more rounds pass the complete chunks on. Each rank sends ``2 (P - 1) / P n`` elements,
which no algorithm can undercut by much: every element must leave a rank once to be added and once
to be spread (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).

The time is ``2 (P - 1) (a + n / P / b)`` with latency a and bandwidth b: few bytes, many rounds.
For short arrays lesson 05 is faster.
"""

import numpy as np

from nets import STEPS, descend, join, parameters
from ranks import Array, Rank, main


def ring(rank: Rank, array: Array) -> Array:
    """Return the sum of the ranks' arrays, (n,)."""
    size, left, right = rank.size, (rank.rank - 1) % rank.size, (rank.rank + 1) % rank.size
    length = -(-len(array) // size)
    chunks = np.zeros((size, length))  # (P, n / P)
    chunks.reshape(-1)[: len(array)] = array
    for i in range(size - 1):  # add: chunk r travels from rank r over all ranks
        rank.send(chunks[(rank.rank - i) % size], right)
        # exercise: add the chunk from the left to yours
        chunks[(rank.rank - i - 1) % size] += rank.receive(left)
    for i in range(size - 1):  # spread: rank r begins with chunk r + 1, which is complete
        rank.send(chunks[(rank.rank + 1 - i) % size], right)
        chunks[(rank.rank - i) % size] = rank.receive(left)
    return chunks.reshape(-1)[: len(array)]


def train(rank: Rank) -> Array:
    """Sum random arrays (n,) in each step."""
    return descend(rank, lambda array: ring(rank, array))


def bytes_sent(size: int) -> int:
    """Return the bytes of a rank: 2 (P - 1) chunks in each step."""
    return STEPS * 2 * (size - 1) * -(-join(parameters()).size // size) * 8


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x 2 (P - 1) ceil(n / P) x 8",
        "pydtnn/comm/schedules/algorithms.py: ring",
    )
