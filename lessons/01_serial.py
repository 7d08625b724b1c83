"""01 Serial training: everything that the other lessons divide over ranks, written out.

A network of three linear layers classifies images of 8 x 8 by the direction of a wave. A step
computes the outputs (forward), the gradient of the mean loss of the batch with respect to each
parameter (backward, by the chain rule from the last layer to the first), and moves each parameter
against its gradient (stochastic gradient descent; Robbins and Monro, 1951).

Three things can be divided: the samples of a batch (lessons 02 to 13), the arrays of a layer (14 to
19), and the layers (20 to 22). Every division must end in the parameters of this file.
"""

import numpy as np

from nets import BATCH, RATE, STEPS, batch, join, parameters, serial
from ranks import Array, Rank, main


def train(rank: Rank) -> Array:
    """Train on whole batches; all ranks compute the same."""
    w1, b1, w2, b2, w3, b3 = parameters()  # (64, 24), (24,), (24, 12), (12,), (12, 4), (4,)
    for step in range(STEPS):
        x, labels = batch(step)  # (N, 8, 8), (N,)
        x0 = x.reshape(BATCH, -1)  # (N, 64)
        x1 = np.maximum(x0 @ w1 + b1, 0)  # (N, 24), after ReLU
        x2 = np.maximum(x1 @ w2 + b2, 0)  # (N, 12)
        scores = x2 @ w3 + b3  # (N, 4)

        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)  # softmax: the probabilities of the classes, (N, 4)
        loss = -np.log(p[np.arange(BATCH), labels]).mean()

        d3 = p  # gradient of the mean loss of the scores, (N, 4)
        d3[np.arange(BATCH), labels] -= 1
        d3 /= BATCH
        # exercise: the gradient of x2, through the last layer and its ReLU
        d2 = (d3 @ w3.T) * (x2 > 0)  # (N, 12)
        d1 = (d2 @ w2.T) * (x1 > 0)  # (N, 24)
        w3 -= RATE * x2.T @ d3
        w2 -= RATE * x1.T @ d2
        w1 -= RATE * x0.T @ d1
        b3, b2, b1 = b3 - RATE * d3.sum(0), b2 - RATE * d2.sum(0), b1 - RATE * d1.sum(0)
        if rank.rank == 0:
            print(f"step {step}: loss {loss:.3f}")
    return join([w1, b1, w2, b2, w3, b3])


if __name__ == "__main__":
    main(train, lambda size: 0, "no messages", "pydtnn/model/naive.py: backward", serial=serial)
