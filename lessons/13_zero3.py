"""13 ZeRO 3: a rank has the parameters of a layer only while it computes this layer.

Each rank owns 1 / P of every layer. Before a layer's forward its parameters are gathered, and freed
after it; they are gathered again before its backward, after which the gradient is scattered. Memory
falls by P; the bytes grow from two to three parts for each layer: two gathers and a scatter instead
of one each. The last layer needs no second gather, since its backward follows its forward
(Rajbhandari et al., 2020, stage 3; Zhao et al., "PyTorch FSDP", 2023).
"""

import numpy as np

from nets import (
    BATCH,
    RATE,
    SIZES,
    STEPS,
    batch,
    cross_entropy,
    cut,
    join,
    linear,
    linear_backward,
    parameters,
    part,
    serial,
    split,
)
from ranks import Array, Rank, main

LAYERS = len(SIZES) - 1


def gather(rank: Rank, own: Array, layer: int) -> list[Array]:
    """Return w (I, O) and b (O,) of a layer from the parts of all ranks, (n / P,) each."""
    shapes = [np.empty((SIZES[layer], SIZES[layer + 1])), np.empty(SIZES[layer + 1])]
    flat = np.concatenate(rank.allgather(own))
    return split(flat[: sum(a.size for a in shapes)], shapes)


def train(rank: Rank) -> Array:
    """Train with parameters that are gathered when they are needed."""
    params = parameters()
    own = [cut(params[2 * i : 2 * i + 2], rank.size)[rank.rank] for i in range(LAYERS)]
    del params  # from here on a rank has 1 / P of each layer
    for step in range(STEPS):
        x, labels = (part(a, rank.rank, rank.size) for a in batch(step))
        inputs = [x.reshape(len(x), -1)]
        for i in range(LAYERS):
            w, b = gather(rank, own[i], i)
            inputs.append(linear(inputs[-1], w, b))
            if i < LAYERS - 1:
                inputs[-1] = np.maximum(inputs[-1], 0)
                del w, b
        _, dy = cross_entropy(inputs.pop(), labels)
        for i in reversed(range(LAYERS)):
            if i < LAYERS - 1:
                w, b = gather(rank, own[i], i)
            dx, dw, db = linear_backward(dy, inputs[i], w)
            dy = dx * (inputs[i] > 0)
            del w, b
            # exercise: update the part of this rank
            own[i] -= RATE / BATCH * rank.reduce_scatter(list(cut([dw, db], rank.size)))
    return join([array for i in range(LAYERS) for array in gather(rank, own[i], i)])


def bytes_sent(size: int) -> int:
    """Return the bytes of the parts: three for each layer and step, two for the last layer."""
    params = parameters()
    parts = [-(-join(params[i : i + 2]).size // size) for i in range(0, len(params), 2)]
    return (size - 1) * 8 * (STEPS * (3 * sum(parts) - parts[-1]) + sum(parts))


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "(P - 1) x 8 x (steps x (3 x parts - that of the last layer) + parts in the end)",
        "pydtnn/parallel/schemes/sharded_parameters.py: ShardedParameters",
        serial=serial,
    )
