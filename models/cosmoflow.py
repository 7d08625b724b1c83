"""CosmoFlow: cosmological parameters from volumes of dark matter."""

from __future__ import annotations

from pydtnn.layers import (
    Conv3d,
    Dropout,
    Flatten,
    Layer,
    LeakyReLU,
    Linear,
    MaxPool3d,
    Rescale,
    Sequential,
    Tanh,
)

SLOPE = 0.3
"""Slope of the activations for negative inputs."""


def cosmoflow(
    classes: int,
    input_shape: tuple[int, ...],
    *,
    filters: int = 32,
    kernel: int = 2,
    stages: int = 5,
    features: tuple[int, ...] = (128, 64),
    dropout: float = 0.5,
) -> Sequential:
    """Stages of a convolution and a pooling that halves volumes, then three linear layers.

    This is the network of MLPerf HPC, not that of the paper, which has seven convolutions, of one
    channel; here the channels are four redshifts. It has 5,597,604 parameters for volumes of
    (128, 128, 128, 4) and 4 targets, 8,907,556 with ``kernel=3``.

    Parameters
    ----------
    classes : int
        Targets, each normalised to -1..1.
    input_shape : tuple of int
        Volumes ``(D, H, W, C)`` of at least ``2 ** stages`` along each side.
    filters : int
        Of the first convolution; each stage has twice as many as the one before.
    kernel : int
        Side of the filters.
    stages : int
    features : tuple of int
        Of the hidden linear layers.
    dropout : float
        Rate after each of these.

    Returns
    -------
    Sequential
        Gives predictions ``(N, classes)`` of -1.2..1.2; the loss is ``mse``.

    References
    ----------
    Mathuriya et al., "CosmoFlow: using deep learning to learn the universe at scale", SC 2018.
    Farrell et al., "MLPerf HPC: a holistic benchmark suite for scientific machine learning on HPC
    systems", MLHPC 2021.
    """
    if len(input_shape) != 4:
        raise ValueError(
            f"cosmoflow: expected volumes of shape (D, H, W, C), got {tuple(input_shape)}"
        )
    *sides, _ = input_shape
    if min(sides) < 2**stages:
        least, given = (" x ".join(map(str, n)) for n in ([2**stages] * 3, sides))
        raise ValueError(
            f"cosmoflow: volumes must be at least {least} for {stages} stages, got {given}; use "
            "fewer stages"
        )
    parts: list[Layer] = []
    for i in range(stages):
        parts += [
            Conv3d(
                filters * 2**i,
                kernel,
                padding="same",
                initializer="glorot_uniform",
                name=f"conv{i + 1}",
            ),
            LeakyReLU(SLOPE, name=f"relu{i + 1}"),
            MaxPool3d(2, name=f"pool{i + 1}"),
        ]
    parts.append(Flatten(name="flatten"))
    for i, number in enumerate(features, start=1):
        parts += [
            Linear(number, name=f"fc{i}"),
            LeakyReLU(SLOPE, name=f"relu{stages + i}"),
            Dropout(dropout, name=f"dropout{i}"),
        ]
    parts.append(Linear(classes, name=f"fc{len(features) + 1}"))
    return Sequential(*parts, Tanh(name="tanh"), Rescale(1.2, name="range"))
