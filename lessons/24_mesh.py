"""24 A mesh: three ways to divide at once.

Ranks are numbered along three axes, data x pipeline x tensor. Each axis does what its lesson did
among the ranks that differ in this axis only: the sum of gradients along data (lesson 02), stages
along pipeline (20), columns and rows along tensor (16). Nothing has to know the other axes, which
is why a library can offer them apart. Messages of the tensor axis are the most frequent: its ranks
should be neighbours on a host (Narayanan et al., "Efficient large-scale language model training on
GPU clusters using Megatron-LM", 2021).

Here a stage is some pairs of layers as in lesson 16, with residuals: ``y = x + tanh(x a) b``. The
twelve pairs make rounding larger than in other lessons. Which axes there are depends on the number
of ranks, and is printed: all three need eight (`--ranks 8`).
"""

import numpy as np

from nets import BATCH, CLASSES, RATE, STEPS, batch, cross_entropy, join, part, square
from ranks import Array, Rank, main

WIDTH, HIDDEN, PAIRS = 64, 24, 12
MESHES = {1: (1, 1, 1), 2: (1, 1, 2), 3: (1, 3, 1), 4: (2, 1, 2), 6: (1, 3, 2), 8: (2, 2, 2)}
"""Data, pipeline, tensor by the number of ranks."""


def train(rank: Rank) -> Array:
    """Train pairs of layers and scores on a mesh."""
    shape = MESHES[rank.size]
    places = np.arange(rank.size).reshape(shape)  # (data, pipeline, tensor): ranks
    d, p, t = (int(i[0]) for i in np.nonzero(places == rank.rank))
    data, tensor = (rank.group([int(r) for r in row]) for row in (places[:, p, t], places[d, p]))
    stage = part(np.arange(PAIRS), p, shape[1])
    first, last = p == 0, p == shape[1] - 1
    a = [part(square(2 * i, WIDTH, HIDDEN), t, shape[2], axis=1) for i in stage]  # (D, H / T)
    b = [part(square(2 * i + 1, HIDDEN, WIDTH), t, shape[2]) for i in stage]  # (H / T, D)
    out = square(99, WIDTH, CLASSES)  # (D, 4), of the last stage
    if rank.rank == 0 and rank.size > 1:
        print("data {} x pipeline {} x tensor {}".format(*shape))
    for step in range(STEPS):
        images, labels = (part(array, d, shape[0]) for array in batch(step))
        x = images.reshape(len(images), -1) if first else rank.receive(int(places[d, p - 1, t]))
        xs, hs = [], []
        for left, right in zip(a, b, strict=True):
            xs.append(x)
            hs.append(np.tanh(x @ left))  # (N / D, H / T)
            x = x + tensor.allreduce(hs[-1] @ right)  # (N / D, 64)
        if last:
            _, scores = cross_entropy(x @ out, labels)
            dx, dout = scores @ out.T, x.T @ scores
        else:
            rank.send(x, int(places[d, p + 1, t]))
            dx, dout = rank.receive(int(places[d, p + 1, t])), np.zeros_like(out)
        grads = [dout]
        for left, right, inp, h in reversed(list(zip(a, b, xs, hs, strict=True))):
            dh = (dx @ right.T) * (1 - h * h)
            grads += [h.T @ dx, inp.T @ dh]  # of b and a of this pair
            # exercise: the gradient of the input of this pair of layers
            dx = dx + tensor.allreduce(dh @ left.T)
        if not first:
            rank.send(dx, int(places[d, p - 1, t]))
        total = RATE / 4 / BATCH * data.allreduce(join(grads))  # among ranks with these parameters
        for w in [out, *(w for pair in zip(reversed(b), reversed(a), strict=True) for w in pair)]:
            w -= total[: w.size].reshape(w.shape)
            total = total[w.size :]
    return whole(rank, shape, a, b, out)


def whole(rank: Rank, shape: tuple[int, ...], a: list[Array], b: list[Array], out: Array) -> Array:
    """Return the parameters of all pairs and the last stage's `out`, to compare."""
    every = np.array([*rank.allgather(join([*a, *b, out]))])  # (P, n)
    every = every.reshape(*shape, -1)[0]  # (pipeline, tensor, n)
    pairs, columns = PAIRS // shape[1], HIDDEN // shape[2]
    n = pairs * WIDTH * columns
    left = every[..., :n].reshape(*shape[1:], pairs, WIDTH, columns)
    right = every[..., n : 2 * n].reshape(*shape[1:], pairs, columns, WIDTH)
    return join(
        [left.transpose(0, 2, 3, 1, 4), right.transpose(0, 2, 1, 3, 4), every[-1, 0, -out.size :]]
    )


def bytes_sent(size: int) -> int:
    """Return the bytes of rank 0: sums along tensor and data, outputs along pipeline, the end."""
    data, pipeline, tensor = MESHES[size]
    samples, pairs = BATCH // data, PAIRS // pipeline
    n = 2 * pairs * WIDTH * HIDDEN // tensor + WIDTH * CLASSES
    step = 2 * pairs * 2 * (tensor - 1) * -(-samples * WIDTH // tensor)  # forward and backward
    step += samples * WIDTH * (pipeline > 1) + 2 * (data - 1) * -(-n // data)
    return 8 * (STEPS * step + (size - 1) * n)


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "8 (steps x (tensor sums + stage outputs + data sums) + (P - 1) n)",
        "pydtnn/parallel/mesh.py: Mesh",
    )
