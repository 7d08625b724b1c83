"""GoogLeNet, with batch norm."""

from __future__ import annotations

from functools import partial

from pydtnn.layers import (
    AdaptiveAvgPool2d,
    Block,
    Branches,
    Concat,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    Sequential,
)
from pydtnn.models.auxiliary import Heads
from pydtnn.models.images import image_size, is_small
from pydtnn.models.units import unit
from pydtnn.utils.validate import check_int

FILTERS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Of each block: 1 x 1; before 3 x 3, 3 x 3; before 5 x 5, 5 x 5; after pooling: table 1."""

POOLS = {"4a": 3, "5a": 2}
"""Window of the pooling before a block."""

HEADS = ("4a", "4d")
"""Blocks whose outputs the auxiliary outputs read."""


def googlenet(
    classes: int,
    input_shape: tuple[int, ...],
    *,
    kernel: int = 3,
    dropout: float = 0.2,
    auxiliary: bool = False,
    auxiliary_dropout: float = 0.7,
) -> Block:
    """Blocks of parallel convolutions of different sizes.

    Each convolution is followed by batch norm, as in Ioffe and Szegedy 2015. For small images the
    stem is one 3 x 3 convolution, which keeps the image's size.

    Parameters
    ----------
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 8 x 8; below 64 x 64 they get the small stem.
    kernel : int
        Size of the largest convolution of a block, odd: 5 in the paper, 3 in the networks whose
        weights PyTorch and TensorFlow publish.
    dropout : float
        Rate before the output.
    auxiliary : bool
        Whether there are two more outputs, which read blocks in the middle and are used in training
        only: ``Trainer(..., auxiliary_weights=[0.3, 0.3])``.
    auxiliary_dropout : float
        Rate before the auxiliary outputs.

    Returns
    -------
    Block
        Gives logits ``(N, classes)``, or three such arrays, the first of which is the main output.

    Raises
    ------
    ValueError
        For an even kernel, or an image that is too small.

    References
    ----------
    Szegedy et al., "Going deeper with convolutions", CVPR 2015, table 1 and section 5.
    """
    if check_int("googlenet", "kernel", kernel, at_least=1) % 2 == 0:
        raise ValueError(f"googlenet: kernel must be odd, such as 3 or 5, got {kernel}")
    image_size("googlenet", input_shape, at_least=8)
    parts: list[Net] = [_small_stem() if is_small(input_shape) else _stem()]
    for block, filters in FILTERS.items():
        if block in POOLS:
            parts.append(_pool(POOLS[block], f"pool{int(block[0]) - 1}"))
        parts.append(_block(filters, kernel, f"block{block}"))
    parts += [
        GlobalAvgPool2d(name="pool"),
        Dropout(dropout, name="dropout"),
        Linear(classes, name="fc"),
    ]
    if not auxiliary:
        return Sequential(*parts)
    heads = {
        f"block{block}": _auxiliary(classes, auxiliary_dropout, f"auxiliary{i}")
        for i, block in enumerate(HEADS, start=1)
    }
    return Heads(*parts, heads=heads)


_conv = partial(unit, epsilon=1e-3)


def _stem() -> Sequential:
    return Sequential(
        _conv(64, 7, stride=2, padding=3, name="conv1"),
        _pool(3, "pool1"),
        _conv(64, 1, name="conv2"),
        _conv(192, 3, padding=1, name="conv3"),
        _pool(3, "pool2"),
        name="stem",
    )


def _small_stem() -> Sequential:
    return Sequential(_conv(192, 3, padding=1, name="conv1"), name="stem")


def _pool(window: int, name: str) -> MaxPool2d:
    """Halve the image; an odd row or column at the end has a window of its own."""
    return MaxPool2d(window, stride=2, padding=((0, 1), (0, 1)), name=name)


def _block(filters: tuple[int, ...], kernel: int, name: str) -> Branches:
    """Figure 2 (b)."""
    one, before3, three, before5, five, pooled = filters
    return Branches(
        _conv(one, 1, name="one"),
        Sequential(
            _conv(before3, 1, name="reduce"), _conv(three, 3, padding=1, name="conv"), name="three"
        ),
        Sequential(
            _conv(before5, 1, name="reduce"),
            _conv(five, kernel, padding=kernel // 2, name="conv"),
            name="five",
        ),
        Sequential(
            MaxPool2d(3, stride=1, padding=1, name="max"),
            _conv(pooled, 1, name="conv"),
            name="pool",
        ),
        merge=Concat(name="concat"),
        name=name,
    )


def _auxiliary(classes: int, dropout: float, name: str) -> Sequential:
    return Sequential(
        AdaptiveAvgPool2d(4, name="pool"),
        _conv(128, 1, name="conv"),
        Flatten(name="flatten"),
        Linear(1024, initializer="he_normal", name="fc1"),
        ReLU(name="relu"),
        Dropout(dropout, name="dropout"),
        Linear(classes, name="fc2"),
        name=name,
    )
