"""VGG networks."""

from __future__ import annotations

from functools import partial

from pydtnn.layers import (
    AdaptiveAvgPool2d,
    BatchNorm,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    Sequential,
)
from pydtnn.models.images import image_size, is_small

FILTERS = (64, 128, 256, 512, 512)
CONVOLUTIONS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions of each of the five stages, by depth: table 1, columns A, B, D and E."""


def vgg(
    depth: int,
    classes: int,
    input_shape: tuple[int, ...],
    *,
    batch_norm: bool = False,
    features: int = 4096,
    dropout: float = 0.5,
) -> Sequential:
    """Stages of 3 x 3 convolutions, each ended by pooling; small images have one linear layer.

    Parameters
    ----------
    depth : int
        11, 13, 16 or 19 layers with weights, as counted for ImageNet.
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 32 x 32; below 64 x 64 they get the small form.
    batch_norm : bool
        Whether batch norm follows each convolution.
    features : int
        Of each hidden fully connected layer.
    dropout : float
        Rate after each of these.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    Raises
    ------
    ValueError
        For another depth, or an image that is too small.

    References
    ----------
    Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
    ICLR 2015, table 1.
    """
    if depth not in CONVOLUTIONS:
        raise ValueError(f"vgg: depth must be one of {tuple(CONVOLUTIONS)}, not {depth}")
    height, width = image_size(f"vgg{depth}", input_shape, at_least=32)
    stages = [
        _stage(filters, convolutions, batch_norm, name=f"stage{i}")
        for i, (filters, convolutions) in enumerate(
            zip(FILTERS, CONVOLUTIONS[depth], strict=True), start=1
        )
    ]
    if is_small(input_shape):
        head = [GlobalAvgPool2d(name="pool"), Linear(classes, name="fc")]
        return Sequential(*stages, Sequential(*head, name="head"))
    head = [
        AdaptiveAvgPool2d((min(7, height // 32), min(7, width // 32)), name="pool"),
        Flatten(name="flatten"),
    ]
    for i in (1, 2):
        head += [
            Linear(features, initializer="he_normal", name=f"fc{i}"),
            ReLU(name=f"relu{i}"),
            Dropout(dropout, name=f"dropout{i}"),
        ]
    return Sequential(*stages, Sequential(*head, Linear(classes, name="fc3"), name="head"))


def _stage(filters: int, convolutions: int, batch_norm: bool, *, name: str) -> Sequential:
    parts: list[Net] = []
    for i in range(1, convolutions + 1):
        parts.append(Conv2d(filters, 3, padding=1, name=f"conv{i}"))
        if batch_norm:
            parts.append(BatchNorm(name=f"bn{i}"))
        parts.append(ReLU(name=f"relu{i}"))
    return Sequential(*parts, MaxPool2d(2, name="pool"), name=name)


vgg11, vgg13, vgg16, vgg19 = (partial(vgg, depth) for depth in CONVOLUTIONS)
vgg11_bn, vgg13_bn, vgg16_bn, vgg19_bn = (
    partial(vgg, depth, batch_norm=True) for depth in CONVOLUTIONS
)
