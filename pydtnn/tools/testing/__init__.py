"""Checks of the contracts of layers, losses, metrics, parallel schemes and plans."""

from __future__ import annotations

import warnings
from functools import partial

from pydtnn.kernels import Backend, create_backend
from pydtnn.layers.base import Layer, Shape
from pydtnn.tools.testing import case, values
from pydtnn.tools.testing.case import LayerCase
from pydtnn.tools.testing.objective import check_loss, check_metric
from pydtnn.tools.testing.plan import check_plan
from pydtnn.tools.testing.scheme import check_scheme

SEEDS = 3
"""Seeds with which gradients are compared with differences."""

CHECKS = (
    values.check_output,
    values.check_repeatable,
    values.check_gradients,
    values.check_in_flight,
    values.check_accumulation,
    values.check_halves,
    values.check_unneeded_gradient,
    values.check_empty_batch,
    values.check_float32,
    values.check_16_bits,
    case.check_saves,
    case.check_new_output,
    case.check_new_gradient,
    case.check_overwriting,
)


def check_layer(
    layer: Layer,
    *input_shapes: Shape,
    backend: Backend | str = "numpy",
    batch: int = 3,
    positive: bool = False,
    seed: int = 0,
) -> None:
    """Check the contract of a layer, in training and in evaluation.

    The output has the shape that `build` returns. A repeated pass has the same results: random
    numbers depend on the context only. The gradients of inputs and parameters agree with central
    differences in float64. Two forward passes can be in flight. Gradients accumulate. The halves of
    backward, if a layer has them, add up to it. Arrays are not overwritten without permission.
    `saves`, `new_results`, `views` and `may_overwrite` are true. A batch may be empty. float32 and
    bfloat16 agree with float64 within their precision.

    Parameters
    ----------
    layer : Layer
        A layer that is not part of a model; it is copied, so it can be used afterwards.
    *input_shapes : tuple of int
        Shape of one sample of each input, without the batch axis.
    backend : Backend or str
    batch : int
        Samples.
    positive : bool
        Whether inputs must be positive, as for a logarithm; they are then at least 0.5.
    seed : int
        Seed of the random inputs and parameters; gradients are compared for the next ones, too, as
        a unit that is 0 everywhere (a ReLU of few channels) hides what is wrong behind it.

    Raises
    ------
    AssertionError
        With the layer, the quantity that is wrong, and the difference.

    Warns
    -----
    UserWarning
        If a gradient is 0 for all seeds, so that it is not known whether it is right.

    Examples
    --------
    >>> from pydtnn.layers import Conv2d
    >>> check_layer(Conv2d(4, 3, stride=2, padding="same"), (5, 6, 2))
    """
    backend = create_backend(backend) if isinstance(backend, str) else backend
    make = partial(LayerCase, layer, input_shapes, backend=backend, batch=batch, positive=positive)
    for training in (True, False):
        dead: set[str] | None = None
        for number in range(SEEDS):
            case = make(seed=seed + number, training=training)
            case.entries = values.ENTRIES if training and number == 0 else 0
            for check in CHECKS if number == 0 else (values.check_gradients,):
                check(case)
            dead = case.dead if dead is None else dead & case.dead
        for what in sorted(dead or ()):
            warnings.warn(
                f"check_layer: {type(layer).__name__} in {'training' if training else 'evaluation'}"
                f": {what} is 0 for {SEEDS} seeds, so that nothing shows whether it is right; use "
                "other options or shapes",
                stacklevel=2,
            )


__all__ = ["check_layer", "check_loss", "check_metric", "check_plan", "check_scheme"]
