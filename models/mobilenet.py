"""MobileNets v1 and v2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pydtnn.layers import (
    Block,
    Dropout,
    GlobalAvgPool2d,
    Linear,
    Net,
    ReLU6,
    Residual,
    Sequential,
)
from pydtnn.models.images import image_size, is_small
from pydtnn.models.units import unit
from pydtnn.utils.validate import check_float

SEPARABLE = (
    *((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
    *(((512, 1),) * 5),
    *((1024, 2), (1024, 1)),
)
"""Filters and stride of each block of v1: table 1 of Howard et al. 2017."""

INVERTED = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, filters, blocks and first stride of each stage of v2: table 2 of Sandler et al."""


def mobilenet_v1(classes: int, input_shape: tuple[int, ...], *, width: float = 1.0) -> Sequential:
    """Depthwise 3 x 3 convolutions, each followed by a 1 x 1 convolution.

    For small images, the first two strides of 2 (of the stem and of the block with the first 128
    filters) are 1, so that 32 x 32 pixels become 4 x 4.

    Parameters
    ----------
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 8 x 8; below 64 x 64 they get the small form.
    width : float
        Factor on the number of filters of each layer.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    Raises
    ------
    ValueError
        If the width is not positive, or an image is too small.

    References
    ----------
    Howard et al., "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision
    Applications", 2017, table 1 and section 3.3.
    """
    width = check_float("mobilenet_v1", "width", width, above=0)
    image_size("mobilenet_v1", input_shape, at_least=8)
    first, *strides = _strides((2, *(stride for _, stride in SEPARABLE)), input_shape)
    channels = _times(width, 32)
    parts: list[Net] = [unit(channels, 3, stride=first, padding=1, name="stem")]
    for i, ((filters, _), stride) in enumerate(zip(SEPARABLE, strides, strict=True), start=1):
        filters = _times(width, filters)
        parts.append(_separable(channels, filters, stride, name=f"block{i}"))
        channels = filters
    head = [GlobalAvgPool2d(name="pool"), Linear(classes, name="fc")]
    return Sequential(*parts, Sequential(*head, name="head"))


def mobilenet_v2(
    classes: int, input_shape: tuple[int, ...], *, width: float = 1.0, dropout: float = 0.2
) -> Sequential:
    """Residual blocks that are wide in their depthwise convolution and narrow between blocks.

    For small images, the first two strides of 2 (of the stem and of the stage with 24 filters) are
    1, so that 32 x 32 pixels become 4 x 4.

    Parameters
    ----------
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 8 x 8; below 64 x 64 they get the small form.
    width : float
        Factor on the number of filters of each layer, which is rounded to a multiple of 8. The last
        convolution has at least 1280.
    dropout : float
        Rate before the output.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    Raises
    ------
    ValueError
        If the width is not positive, or an image is too small.

    References
    ----------
    Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018, table 2
    and figure 4.
    """
    width = check_float("mobilenet_v2", "width", width, above=0)
    image_size("mobilenet_v2", input_shape, at_least=8)
    first, *strides = _strides((2, *(stride for *_, stride in INVERTED)), input_shape)
    channels = _multiple_of_8(width * 32)
    parts: list[Net] = [_relu6(channels, 3, stride=first, padding=1, name="stem")]
    for i, (stage, stride) in enumerate(zip(INVERTED, strides, strict=True), start=1):
        expansion, filters, blocks, _ = stage
        filters = _multiple_of_8(width * filters)
        own: list[Net] = []
        for j in range(blocks):
            by = stride if j == 0 else 1
            own.append(_inverted(channels, filters, expansion, by, name=str(j)))
            channels = filters
        parts.append(Sequential(*own, name=f"stage{i}"))
    head: list[Net] = [
        _relu6(_multiple_of_8(max(width, 1.0) * 1280), 1, name=""),
        GlobalAvgPool2d(name="pool"),
        Dropout(dropout, name="dropout"),
        Linear(classes, name="fc"),
    ]
    return Sequential(*parts, Sequential(*head, name="head"))


_relu6 = partial(unit, activation=ReLU6)


def _strides(strides: Sequence[int], input_shape: tuple[int, ...]) -> list[int]:
    """Strides for large images; small ones keep their size where these are first halved twice."""
    result = list(strides)
    if is_small(input_shape):
        for _ in range(2):
            result[result.index(2)] = 1
    return result


def _separable(channels: int, filters: int, stride: int, *, name: str) -> Sequential:
    return Sequential(
        unit(channels, 3, stride=stride, padding=1, groups=channels, name="depthwise"),
        unit(filters, 1, name="pointwise"),
        name=name,
    )


def _inverted(channels: int, filters: int, expansion: int, stride: int, *, name: str) -> Block:
    wide = expansion * channels
    parts = [_relu6(wide, 1, name="expand")] if expansion > 1 else []
    parts += [
        _relu6(wide, 3, stride=stride, padding=1, groups=wide, name="depthwise"),
        unit(filters, 1, activation=None, name="project"),
    ]
    if stride == 1 and channels == filters:
        return Residual(Sequential(*parts, name=""), name=name)
    return Sequential(*parts, name=name)


def _times(width: float, filters: int) -> int:
    return max(1, round(width * filters))


def _multiple_of_8(filters: float) -> int:
    """The nearest multiple of 8, or the next one if that is less than 90 % of `filters`."""
    nearest = max(8, int(filters + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * filters else nearest + 8
