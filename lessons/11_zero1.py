"""11 ZeRO 1: each rank keeps the optimizer's state of a part of the parameters.

Adam keeps two averages for each parameter, twice the memory of the network, and in data parallelism
every rank keeps all of them although all are equal. Here rank r updates only part r. The gradient's
sum is the same ring as before, cut in the middle: after the first half (reduce-scatter) each rank
has the complete sum of one part, which is all that it needs; it updates this part, and the second
half (allgather) spreads the new parameters instead of the sums. The bytes are those of lesson 02
(Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020).

ZeRO 1 keeps whole gradients until the end of backward. Lesson 12 does not.
"""

import numpy as np

from nets import BATCH, STEPS, batch, gradients, join, parameters, part, split
from ranks import Array, Rank, main

RATE, BETA1, BETA2, EPSILON = 0.01, 0.9, 0.99, 1e-8


def adam(p: Array, g: Array, m: Array, v: Array, step: int) -> None:
    """Update a part of the parameters, (n / P,) each, in place (Kingma and Ba, 2015)."""
    m += (1 - BETA1) * (g - m)
    v += (1 - BETA2) * (g * g - v)
    corrected = np.sqrt(v / (1 - BETA2 ** (step + 1))) + EPSILON
    p -= RATE * m / (1 - BETA1 ** (step + 1)) / corrected


def train(rank: Rank) -> Array:
    """Train with Adam, whose averages are divided over the ranks."""
    params = parameters()
    n = join(params).size
    length = -(-n // rank.size)  # n / P, rounded up
    m, v = np.zeros(length), np.zeros(length)  # of this rank's part only
    for step in range(STEPS):
        x, labels = (part(a, rank.rank, rank.size) for a in batch(step))
        _, grads = gradients(params, x, labels)
        padded = np.zeros((rank.size, length))  # (P, n / P)
        padded.reshape(-1)[:n] = join(grads) / BATCH
        # exercise: the sum of the part that this rank updates
        mine = rank.reduce_scatter(list(padded))  # (n / P,): the sum of part r
        padded.reshape(-1)[:n] = join(params)
        adam(padded[rank.rank], mine, m, v, step)
        params = split(np.concatenate(rank.allgather(padded[rank.rank]))[:n], params)
    return join(params)


def bytes_sent(size: int) -> int:
    """Return the bytes of a reduce-scatter and an allgather of parts."""
    return STEPS * 2 * (size - 1) * -(-join(parameters()).size // size) * 8


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x 2 (P - 1) ceil(n / P) x 8",
        "pydtnn/parallel/schemes/sharded.py: ShardedOptimizer",
    )
