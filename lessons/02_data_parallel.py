"""02 Data parallelism: each rank has the whole network and a part of the samples.

The loss of a batch is a sum over samples, and so is its gradient. Each rank computes the gradient
of its own samples; one sum over all ranks (allreduce) then gives every rank the gradient of the
whole batch, and all of them make the same step. Parameters are never sent: they begin equal and
stay equal (Valiant, "A bridging model for parallel computation", 1990; for networks Dean et al.,
"Large scale distributed deep networks", 2012).

All gradients travel in one message here, after backward. Lesson 03 begins earlier.
"""

from nets import BATCH, RATE, STEPS, batch, gradients, join, parameters, part, serial, split
from ranks import Array, Rank, main


def train(rank: Rank) -> Array:
    """Train with the samples divided over the ranks."""
    params = parameters()
    for step in range(STEPS):
        x, labels = batch(step)  # (N, 8, 8), (N,)
        x, labels = part(x, rank.rank, rank.size), part(labels, rank.rank, rank.size)  # N / P
        _, grads = gradients(params, x, labels)  # sums over N / P samples
        # exercise: the gradient of the whole batch, on every rank
        total = rank.allreduce(join(grads))  # (n,): the sum over N samples, on every rank
        for p, g in zip(params, split(total, params), strict=True):
            p -= RATE / BATCH * g
    return join(params)


def bytes_sent(size: int) -> int:
    """Return the bytes of a ring: P - 1 parts of n / P are sent twice in each step."""
    n = join(parameters()).size
    return STEPS * 2 * (size - 1) * -(-n // size) * 8


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x 2 (P - 1) ceil(n / P) x 8",
        "pydtnn/parallel/exchange.py: AllReduce",
        serial=serial,
    )
