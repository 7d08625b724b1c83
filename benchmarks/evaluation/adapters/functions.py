"""The network of a job by functions, in frameworks that have one for each kind of layer."""

WEIGHTS = {"conv": 1, "bn": 2, "dense": 2}
"""Of a layer of each kind."""


def apply(functions, layers, weights, x):
    """Return the values of a list of layers.

    `functions` has one for each kind, of the values, the numbers of the layer (see `networks.py`)
    and its weights; `weights` is an iterator.
    """
    for kind, *numbers in layers:
        if kind == "residual":
            body = apply(functions, numbers[0], weights, x)
            x = body + (apply(functions, numbers[1], weights, x) if numbers[1] else x)
        else:
            own = [next(weights) for _ in range(WEIGHTS.get(kind, 0))]
            x = functions[kind](x, *numbers, *own)
    return x


def channels_first(weights):
    """Return weights as frameworks have them whose maps are (samples, channels, height, width)."""
    return [w.transpose(3, 2, 0, 1).copy() if w.ndim == 4 else w for w in weights]
