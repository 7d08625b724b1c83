"""DenseNets: the narrow ones for CIFAR and the wide ones for ImageNet."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from pydtnn.layers import (
    AvgPool2d,
    BatchNorm,
    Block,
    Concat,
    Conv2d,
    Dropout,
    GlobalAvgPool2d,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    Sequential,
)
from pydtnn.layers.blocks import GraphBuilder
from pydtnn.layers.node import Node, nodes
from pydtnn.models.images import image_size, is_small
from pydtnn.utils.validate import check_float, check_int

LAYERS = {
    121: (6, 12, 24, 16),
    161: (6, 12, 36, 24),
    169: (6, 12, 32, 32),
    201: (6, 12, 48, 32),
}
"""Layers of each block of the networks for ImageNet, by depth: table 1."""


class Dense(Block):
    """``y = concat(x, body(x))``: the body's channels are added to those of its input.

    Parameters
    ----------
    body : Layer or Block
    name : str, optional

    References
    ----------
    Huang et al., "Densely Connected Convolutional Networks", CVPR 2017, equation 2.
    """

    def __init__(self, body: Net, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.body = body

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Node:
        """Connect the body to the input, and the concatenation to both."""
        added = nodes(graph.add(self.body, *inputs, label="body"))
        return graph.add(Concat(name="concat"), *inputs, *added)


def cifar_densenet(
    depth: int,
    classes: int,
    input_shape: tuple[int, ...],
    *,
    growth: int = 12,
    bottleneck: bool = False,
    compression: float = 1.0,
    dropout: float = 0.0,
) -> Sequential:
    """Three blocks of equal length, in which every layer reads the outputs of all before it.

    Parameters
    ----------
    depth : int
        Layers with weights: 3 n + 4 for n layers per block, 6 n + 4 with bottlenecks.
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 4 x 4.
    growth : int
        Filters of each layer.
    bottleneck : bool
        Whether a 1 x 1 convolution of ``4 growth`` filters precedes each 3 x 3 convolution
        (DenseNet-B). The first convolution then has ``2 growth`` filters, else 16.
    compression : float
        Part of the channels that is left between two blocks, in (0, 1] (DenseNet-C).
    dropout : float
        Rate after each convolution but the first; 0.2 in the paper if images are not augmented.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    Raises
    ------
    ValueError
        For another depth, options out of range, or an image that is too small.

    References
    ----------
    Huang et al., "Densely Connected Convolutional Networks", CVPR 2017, section 3.
    """
    each = 6 if bottleneck else 3
    if depth < each + 4 or (depth - 4) % each:
        raise ValueError(
            f"cifar_densenet: depth must be {each} n + 4, such as 40 or 100, not {depth}"
        )
    growth = check_int("cifar_densenet", "growth", growth, at_least=1)
    compression = check_float("cifar_densenet", "compression", compression, above=0, at_most=1)
    image_size(f"densenet{depth}", input_shape, at_least=4)
    filters = 2 * growth if bottleneck else 16
    layers = ((depth - 4) // each,) * 3
    return Sequential(
        Sequential(_conv(filters, 3, name="conv"), name="stem"),
        *_blocks(layers, filters, growth, bottleneck, compression, dropout),
        _head(classes),
    )


def imagenet_densenet(
    depth: int,
    classes: int,
    input_shape: tuple[int, ...],
    *,
    growth: int = 32,
    dropout: float = 0.0,
) -> Sequential:
    """Four blocks with bottlenecks, and half of the channels left between them.

    For small images the stem is one 3 x 3 convolution, which keeps the image's size.

    Parameters
    ----------
    depth : int
        121, 161, 169 or 201.
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 8 x 8; below 64 x 64 they get the small stem.
    growth : int
        Filters of each layer; by default 48 for `densenet161`.
    dropout : float
        Rate after each convolution but the first.

    Returns
    -------
    Sequential
        Gives logits ``(N, classes)``.

    Raises
    ------
    ValueError
        For another depth, options out of range, or an image that is too small.

    References
    ----------
    Huang et al., "Densely Connected Convolutional Networks", CVPR 2017, table 1.
    """
    if depth not in LAYERS:
        raise ValueError(f"imagenet_densenet: depth must be one of {tuple(LAYERS)}, not {depth}")
    growth = check_int("imagenet_densenet", "growth", growth, at_least=1)
    image_size(f"densenet{depth}", input_shape, at_least=8)
    filters = 2 * growth
    stem: list[Net] = [_conv(filters, 3, name="conv")]
    if not is_small(input_shape):
        stem = [
            _conv(filters, 7, stride=2, name="conv"),
            BatchNorm(name="bn"),
            ReLU(name="relu"),
            MaxPool2d(3, stride=2, padding=1, name="pool"),
        ]
    return Sequential(
        Sequential(*stem, name="stem"),
        *_blocks(LAYERS[depth], filters, growth, True, 0.5, dropout),
        _head(classes),
    )


def _blocks(
    layers: Iterable[int],
    channels: int,
    growth: int,
    bottleneck: bool,
    compression: float,
    dropout: float,
) -> list[Net]:
    """Blocks of dense layers, with a transition between each two of them."""
    parts: list[Net] = []
    for i, length in enumerate(layers, start=1):
        if i > 1:
            channels = int(compression * channels)
            transition = [*_unit(channels, 1, dropout), AvgPool2d(2, name="pool")]
            parts.append(Sequential(*transition, name=f"transition{i - 1}"))
        dense = (_dense(growth, bottleneck, dropout, name=str(j)) for j in range(length))
        parts.append(Sequential(*dense, name=f"block{i}"))
        channels += length * growth
    return parts


def _dense(growth: int, bottleneck: bool, dropout: float, *, name: str) -> Dense:
    first = _unit(4 * growth, 1, dropout, "1") if bottleneck else []
    body = [*first, *_unit(growth, 3, dropout, "2" if bottleneck else "")]
    return Dense(Sequential(*body, name=""), name=name)


def _unit(filters: int, kernel: int, dropout: float, suffix: str = "") -> list[Net]:
    drop: list[Net] = [Dropout(dropout, name=f"dropout{suffix}")] if dropout else []
    return [
        BatchNorm(name=f"bn{suffix}"),
        ReLU(name=f"relu{suffix}"),
        _conv(filters, kernel, name=f"conv{suffix}"),
        *drop,
    ]


def _conv(filters: int, kernel: int, *, stride: int = 1, name: str) -> Conv2d:
    return Conv2d(filters, kernel, stride=stride, padding=kernel // 2, bias=False, name=name)


def _head(classes: int) -> Sequential:
    return Sequential(
        BatchNorm(name="bn"),
        ReLU(name="relu"),
        GlobalAvgPool2d(name="pool"),
        Linear(classes, name="fc"),
        name="head",
    )


densenet40 = partial(cifar_densenet, 40)
densenet100 = partial(cifar_densenet, 100, bottleneck=True, compression=0.5)
densenet121, densenet169, densenet201 = (
    partial(imagenet_densenet, depth) for depth in (121, 169, 201)
)
densenet161 = partial(imagenet_densenet, 161, growth=48)
