"""Residual networks: the narrow ones for CIFAR, and ResNets and ResNeXts for ImageNet."""

from __future__ import annotations

from functools import partial

from pydtnn.layers import (
    BatchNorm,
    Conv2d,
    GlobalAvgPool2d,
    Identity,
    Linear,
    MaxPool2d,
    Net,
    Pad,
    ReLU,
    Residual,
    Sequential,
    Slice,
)
from pydtnn.models.images import image_size, is_small
from pydtnn.utils.names import unknown
from pydtnn.utils.validate import check_int

SHORTCUTS = ("projection", "A")

BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Blocks of each stage of the networks for ImageNet, by depth: table 1."""

BOTTLENECK = 50
"""From this depth on, blocks are bottlenecks."""


def cifar_resnet(
    depth: int, classes: int, input_shape: tuple[int, ...], *, shortcut: str = "projection"
) -> Sequential:
    """Three stages of 16, 32 and 64 filters, each of ``(depth - 2) / 6`` basic blocks.

    Parameters
    ----------
    depth : int
        Layers with weights: 6 n + 2.
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 4 x 4.
    shortcut : str
        Where a stage begins, "projection" takes a 1 x 1 convolution with batch norm (option B of
        the paper), "A" every other pixel, with zeros for the channels that are missing.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    Raises
    ------
    ValueError
        For another depth or shortcut, or an image that is too small.

    References
    ----------
    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"cifar_resnet: depth must be 6 n + 2, such as 20 or 44, not {depth}")
    if shortcut not in SHORTCUTS:
        raise ValueError(unknown(f"shortcut of resnet{depth}", shortcut, SHORTCUTS))
    image_size(f"resnet{depth}", input_shape, at_least=4)
    blocks = (depth - 2) // 6
    stages, channels = [], 16
    for i, filters in enumerate((16, 32, 64), start=1):
        parts = []
        for j in range(blocks):
            stride = 2 if i > 1 and j == 0 else 1
            by = _shortcut(shortcut, channels, filters, stride)
            parts.append(_block(_basic(filters, stride), by, name=str(j)))
            channels = filters
        stages.append(Sequential(*parts, name=f"stage{i}"))
    return Sequential(_stem(16, 3, 1), *stages, _head(classes))


def imagenet_resnet(
    depth: int,
    classes: int,
    input_shape: tuple[int, ...],
    *,
    groups: int = 1,
    group_width: int = 64,
) -> Sequential:
    """Four stages of basic blocks (18, 34) or bottlenecks (50, 101, 152).

    The stride of a bottleneck is in its 3 x 3 convolution. For small images the stem keeps the
    image's size.

    Parameters
    ----------
    depth : int
        18, 34, 50, 101 or 152.
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 8 x 8; below 64 x 64 they get the small stem.
    groups : int
        Groups of the 3 x 3 convolution of a bottleneck: more than 1 in a ResNeXt.
    group_width : int
        Filters of each group in the first stage; twice as many in each following one.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    Raises
    ------
    ValueError
        For another depth, groups of basic blocks, or an image that is too small.

    References
    ----------
    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, table 1. Goyal et al.,
    "Accurate, Large Minibatch SGD", 2017, section 5.1, for the stride. Xie et al., "Aggregated
    Residual Transformations for Deep Neural Networks", CVPR 2017, table 1, for the groups.
    """
    if depth not in BLOCKS:
        raise ValueError(f"imagenet_resnet: depth must be one of {tuple(BLOCKS)}, not {depth}")
    groups = check_int("imagenet_resnet", "groups", groups, at_least=1)
    group_width = check_int("imagenet_resnet", "group_width", group_width, at_least=1)
    bottlenecks = depth >= BOTTLENECK
    if not bottlenecks and (groups, group_width) != (1, 64):
        raise ValueError(
            f"imagenet_resnet: groups and group_width must be 1 and 64 for depth {depth}, whose "
            f"blocks have no bottlenecks, got {groups} and {group_width}; use depth {BOTTLENECK}"
        )
    image_size(f"{'resnet' if groups == 1 else 'resnext'}{depth}", input_shape, at_least=8)
    stages, channels = [], 64
    for i, blocks in enumerate(BLOCKS[depth], start=1):
        scale = 2 ** (i - 1)
        filters = (256 if bottlenecks else 64) * scale
        parts = []
        for j in range(blocks):
            stride = 2 if i > 1 and j == 0 else 1
            body = (
                _bottleneck(groups * group_width * scale, filters, stride, groups)
                if bottlenecks
                else _basic(filters, stride)
            )
            by = _shortcut("projection", channels, filters, stride)
            parts.append(_block(body, by, name=str(j)))
            channels = filters
        stages.append(Sequential(*parts, name=f"stage{i}"))
    stem = (
        _stem(64, 3, 1)
        if is_small(input_shape)
        else _stem(64, 7, 2, MaxPool2d(3, stride=2, padding=1, name="pool"))
    )
    return Sequential(stem, *stages, _head(classes))


def _conv(filters: int, kernel: int, stride: int, groups: int = 1, *, name: str) -> Conv2d:
    return Conv2d(
        filters,
        kernel,
        stride=stride,
        padding=kernel // 2,
        groups=groups,
        bias=False,
        name=name,
    )


def _stem(filters: int, kernel: int, stride: int, *pool: Net) -> Sequential:
    conv = _conv(filters, kernel, stride, name="conv")
    return Sequential(conv, BatchNorm(name="bn"), ReLU(name="relu"), *pool, name="stem")


def _basic(filters: int, stride: int) -> list[Net]:
    return [
        _conv(filters, 3, stride, name="conv1"),
        BatchNorm(name="bn1"),
        ReLU(name="relu1"),
        _conv(filters, 3, 1, name="conv2"),
        BatchNorm(name="bn2"),
    ]


def _bottleneck(width: int, filters: int, stride: int, groups: int) -> list[Net]:
    return [
        _conv(width, 1, 1, name="conv1"),
        BatchNorm(name="bn1"),
        ReLU(name="relu1"),
        _conv(width, 3, stride, groups, name="conv2"),
        BatchNorm(name="bn2"),
        ReLU(name="relu2"),
        _conv(filters, 1, 1, name="conv3"),
        BatchNorm(name="bn3"),
    ]


def _shortcut(kind: str, channels: int, filters: int, stride: int) -> Net:
    if stride == 1 and channels == filters:
        return Identity()
    if kind == "projection":
        conv = _conv(filters, 1, stride, name="conv")
        return Sequential(conv, BatchNorm(name="bn"), name="shortcut")
    every, missing = slice(None, None, stride), filters - channels
    padding = ((0, 0), (0, 0), (missing // 2, missing - missing // 2))
    return Sequential(Slice(every, every, name="slice"), Pad(padding, name="pad"), name="shortcut")


def _block(body: list[Net], shortcut: Net, *, name: str) -> Sequential:
    residual = Residual(Sequential(*body, name=""), shortcut, name="")
    return Sequential(residual, ReLU(name="relu"), name=name)


def _head(classes: int) -> Sequential:
    return Sequential(GlobalAvgPool2d(name="pool"), Linear(classes, name="fc"), name="head")


resnet8, resnet20, resnet32, resnet44, resnet56, resnet110, resnet1202 = (
    partial(cifar_resnet, depth) for depth in (8, 20, 32, 44, 56, 110, 1202)
)
resnet18, resnet34, resnet50, resnet101, resnet152 = (
    partial(imagenet_resnet, depth) for depth in BLOCKS
)
resnext50 = partial(imagenet_resnet, 50, groups=32, group_width=4)
