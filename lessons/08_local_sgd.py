"""08 Local SGD: ranks step on their own, and average their parameters now and then.

A sum in each step waits for the slowest rank and for the network. Local SGD makes H steps without
any message, each rank with gradients of its own samples, and then replaces the parameters of all by
their mean: 1 / H of the bytes (Stich, "Local SGD converges fast and communicates little", 2019).
The result is not that of serial training, except for H = 1: it is another algorithm, whose
reference is P copies that one process trains in turn.

With H = 1, the mean of the parameters after a step is a step with the mean of the gradients.
"""

from nets import BATCH, RATE, STEPS, batch, gradients, join, parameters, part, split
from ranks import Array, Rank, main

PERIOD = 3
"""Steps between two averages: H."""


def local_step(params: list[Array], step: int, rank: int, size: int) -> None:
    """Make a step with the samples of a rank."""
    x, labels = (part(a, rank, size) for a in batch(step))
    _, grads = gradients(params, x, labels)
    for p, g in zip(params, grads, strict=True):
        p -= RATE * size / BATCH * g  # the mean of N / P samples


def train(rank: Rank) -> Array:
    """Train on each rank alone, and average every `PERIOD` steps."""
    params = parameters()
    for step in range(STEPS):
        local_step(params, step, rank.rank, rank.size)
        if (step + 1) % PERIOD == 0:
            # exercise: the mean of the parameters of all ranks
            mean = rank.allreduce(join(params)) / rank.size  # (n,)
            params = split(mean, params)
    return join(params)


def serial(size: int) -> Array:
    """Train `size` copies in one process."""
    copies = [parameters() for _ in range(size)]
    for step in range(STEPS):
        for rank, params in enumerate(copies):
            local_step(params, step, rank, size)
        if (step + 1) % PERIOD == 0:
            for same in zip(*copies, strict=True):
                mean = sum(same) / size
                for p in same:
                    p[...] = mean
    return join(copies[0])


def bytes_sent(size: int) -> int:
    """Return the bytes of one sum in `PERIOD` steps."""
    return STEPS // PERIOD * 2 * (size - 1) * -(-join(parameters()).size // size) * 8


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps / H x 2 (P - 1) ceil(n / P) x 8",
        "pydtnn/parallel/schemes/local_sgd.py: LocalSGD",
        serial=serial,
    )
