"""25 Exact sums: the same bits for any number of ranks.

Floating-point addition is not associative: (a + b) + c and a + (b + c) differ in the last bits, and
training amplifies the difference until runs on 2 and on 4 ranks are different runs. If the *order*
of additions depends on the samples alone, it is the same for any number of ranks: divide a batch
into a fixed number of shards, and add their gradients by a fixed tree, wherever the shards are
(Demmel and Nguyen, "Parallel reproducible summation", 2015, discuss what can be had without a fixed
order; the tree is the simplest way).

All shards' gradients are gathered here, so that each rank can add the whole tree: many bytes. A
rank that has all shards of a subtree can send its sum instead, as the library does.
"""

from nets import BATCH, RATE, STEPS, batch, gradients, join, parameters, part, split
from ranks import Array, Rank, main

SHARDS = 12
"""Shards of a batch, divided over the ranks; here each is one sample."""


def tree(arrays: list[Array]) -> Array:
    """Return the sum of arrays, always added in this order."""
    if len(arrays) == 1:
        return arrays[0]
    # exercise: where is the list cut?
    half = (len(arrays) + 1) // 2
    return tree(arrays[:half]) + tree(arrays[half:])


def train(rank: Rank) -> Array:
    """Train with gradients that are added by the tree of the shards."""
    params = parameters()
    for step in range(STEPS):
        x, labels = (part(a, rank.rank, rank.size) for a in batch(step))
        shards = [
            join(gradients(params, x[i : i + 1], labels[i : i + 1])[1]) for i in range(len(x))
        ]  # (n,) each; a product of several samples would add them in an order of its own
        gathered = [rank.allgather(shard) for shard in shards]  # [i][r]: shard i of rank r
        ordered = [gathered[i][r] for r in range(rank.size) for i in range(len(shards))]
        for p, g in zip(params, split(tree(ordered), params), strict=True):
            p -= RATE / BATCH * g
    return join(params)


def bytes_sent(size: int) -> int:
    """Return the bytes of all shards of a rank, sent to the others."""
    return STEPS * (size - 1) * SHARDS // size * join(parameters()).size * 8


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x (P - 1) x shards / P x n x 8",
        "pydtnn/parallel/reproducible.py: ExactSums",
        tolerance=0.0,
    )
