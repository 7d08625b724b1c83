"""03 Buckets: gradients are summed while backward still computes those of earlier layers.

Backward finishes the last layer first, so its gradient can travel while the others are computed.
Gradients of some layers form a bucket, which is one message: many small messages would pay their
latency each, a single one would begin at the end. The sum of a bucket is started when its last
gradient is ready, and progresses between layers; the step waits only for what is left (Li et al.,
"PyTorch Distributed: experiences on accelerating data parallel training", 2020).

Here a bucket is a layer, and a sum in progress is a generator: `next` receives and sends one round.
All ranks must advance their sums in the same order, since messages carry no names.
"""

from collections import deque

from nets import BATCH, RATE, STEPS, batch, forward, join, linear_backward, parameters, part, serial
from ranks import Array, Rank, main


def train(rank: Rank) -> Array:
    """Train with a sum for each layer, which is carried out during backward."""
    params = parameters()
    layers = list(zip(params[::2], params[1::2], strict=True))
    for step in range(STEPS):
        x, labels = (part(a, rank.rank, rank.size) for a in batch(step))  # (N / P, 8, 8), (N / P,)
        _, inputs, dy = forward(layers, x, labels)  # inputs of the layers, gradient of the scores

        buckets, sums = [], deque()  # of the last layer first; the sums that are in progress
        for (w, _), inp in zip(reversed(layers), reversed(inputs), strict=True):
            dx, dw, db = linear_backward(dy, inp, w)
            dy = dx * (inp > 0)
            buckets.append(join([dw, db]))
            # exercise: begin the sum of this bucket
            sums.append(rank.ring(buckets[-1]))
            advance(sums)  # its first round, and one more of those that were begun before
        while sums:
            advance(sums)
        for (w, b), bucket in zip(reversed(layers), buckets, strict=True):
            w -= RATE / BATCH * bucket[: w.size].reshape(w.shape)
            b -= RATE / BATCH * bucket[w.size :]
    return join(params)


def advance(sums: deque) -> None:
    """Carry out a round of each sum, and remove those that are complete."""
    for _ in range(len(sums)):
        one = sums.popleft()
        if next(one, "complete") != "complete":
            sums.append(one)


def bytes_sent(size: int) -> int:
    """Return the bytes of a ring for each layer."""
    params = parameters()
    sizes = [w.size + b.size for w, b in zip(params[::2], params[1::2], strict=True)]
    return STEPS * sum(2 * (size - 1) * -(-n // size) * 8 for n in sizes)


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x the sum over layers of 2 (P - 1) ceil(n / P) x 8",
        "pydtnn/training/steps.py: UpdatingPasses",
        serial=serial,
    )
