"""12 ZeRO 2: a gradient leaves its rank as soon as its layer's backward is complete.

ZeRO 1 holds all gradients until the end of backward. Here the parameters of each *layer* are cut
into P parts, and when backward has the gradient of a layer it is summed and scattered at once: each
rank keeps 1 / P of it and frees the rest. At no time does a rank hold more than one layer's whole
gradient. The bytes stay those of lesson 02 (Rajbhandari et al., 2020, stage 2).
"""

import numpy as np

from nets import (
    BATCH,
    RATE,
    STEPS,
    batch,
    cut,
    forward,
    join,
    linear_backward,
    parameters,
    part,
    serial,
    split,
)
from ranks import Array, Rank, main


def train(rank: Rank) -> Array:
    """Train with gradients that are scattered during backward."""
    params = parameters()
    most = 0  # elements of whole gradients that this rank holds at a time
    for step in range(STEPS):
        x, labels = (part(a, rank.rank, rank.size) for a in batch(step))
        layers = list(zip(params[::2], params[1::2], strict=True))
        _, inputs, dy = forward(layers, x, labels)  # inputs of the layers, gradient of the scores

        mine = []  # of the last layer first: (n / P,) each
        for (w, _), inp in zip(reversed(layers), reversed(inputs), strict=True):
            dx, dw, db = linear_backward(dy, inp, w)
            dy = dx * (inp > 0)
            most = max(most, dw.size + db.size)
            # exercise: scatter the gradient of this layer
            mine.append(rank.reduce_scatter(list(cut([dw, db], rank.size))))
            del dw, db  # 1 / P of them is left
        params = []
        for layer, gradient in zip(layers, reversed(mine), strict=True):
            own = cut(layer, rank.size)[rank.rank] - RATE / BATCH * gradient  # (n / P,)
            params += split(np.concatenate(rank.allgather(own))[: join(layer).size], layer)
    assert most == max(w.size + b.size for w, b in layers)
    return join(params)


def bytes_sent(size: int) -> int:
    """Return the bytes of a reduce-scatter and an allgather of each layer."""
    params = parameters()
    sizes = [w.size + b.size for w, b in zip(params[::2], params[1::2], strict=True)]
    return STEPS * sum(2 * (size - 1) * -(-n // size) * 8 for n in sizes)


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x the sum over layers of 2 (P - 1) ceil(n / P) x 8",
        "pydtnn/parallel/schemes/sharded_parameters.py: ShardedGradients",
        serial=serial,
    )
