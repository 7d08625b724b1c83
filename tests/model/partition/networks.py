"""Networks that plans are checked with: small images of odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from models.resnet import cifar_resnet
from models.vgg import CONVOLUTIONS, FILTERS, vgg
from pydtnn.layers import (
    AvgPool2d,
    BatchNorm,
    Branches,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool2d,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    Residual,
    Sequential,
)


class Network(NamedTuple):
    """A network and the shape of its input."""

    net: Callable[[], Net]
    shape: tuple[int, int, int]


def windows() -> Sequential:
    """Strides, 5 x 5 filters and dilation, overlapping pooling, and two linear layers."""
    return Sequential(
        Conv2d(8, 5, padding=2, name="conv1"),
        BatchNorm(),
        ReLU(),
        Conv2d(9, 3, stride=2, padding=1, name="conv2"),
        ReLU(),
        Conv2d(8, 3, padding=2, dilation=2, name="conv3"),
        BatchNorm(),
        ReLU(),
        MaxPool2d(3, 2, padding=1),
        Conv2d(8, 1, bias=False, name="conv4"),
        Flatten(),
        Linear(16, name="fc1"),
        ReLU(),
        Linear(5, name="fc2"),
    )


def branching() -> Sequential:
    """Branches of different channels side by side, one of them depthwise."""
    inception = Branches(
        Conv2d(5, 1, name="one"),
        Sequential(Conv2d(6, 3, padding=1, bias=False), BatchNorm(), ReLU(), name="three"),
        Sequential(AvgPool2d(3, 1, padding=1), Conv2d(5, 1), name="pool"),
        Conv2d(8, 3, padding=1, groups=8, name="depthwise"),
        merge=Concat(),
        name="inception",
    )
    return Sequential(
        Conv2d(8, 3, padding=1, name="stem"),
        BatchNorm(),
        ReLU(),
        inception,
        BatchNorm(),
        ReLU(),
        Conv2d(8, 3, stride=2, padding=1, groups=4, name="grouped"),
        ReLU(),
        GlobalAvgPool2d(),
        Linear(5, name="fc"),
    )


def tall() -> Sequential:
    """Convolutions of stripes that are much taller than their halos."""
    return Sequential(
        Conv2d(4, 3, padding=1, name="conv1"),
        BatchNorm(),
        ReLU(),
        Residual(Sequential(Conv2d(4, 5, padding=2), BatchNorm(), ReLU(), Conv2d(4, 3, padding=1))),
        ReLU(),
        Conv2d(6, 3, stride=2, padding=1, name="conv2"),
        BatchNorm(),
        ReLU(),
        Conv2d(4, (3, 1), padding=((1, 0), (0, 0)), name="conv3"),
        GlobalAvgPool2d(),
        Linear(5, name="fc"),
    )


def narrow_vgg11() -> Sequential:
    """VGG-11 with batch norm and an eighth of the filters."""
    layers: list[Net] = []
    for stage, (filters, convolutions) in enumerate(zip(FILTERS, CONVOLUTIONS[11], strict=True)):
        for i in range(convolutions):
            conv = Conv2d(filters // 8, 3, padding=1, name=f"stage{stage + 1}_conv{i + 1}")
            layers += [conv, BatchNorm(), ReLU()]
        layers.append(MaxPool2d(2))
    return Sequential(*layers, GlobalAvgPool2d(), Linear(5, name="fc"))


def resnet8() -> Net:
    return cifar_resnet(8, 5, (9, 11, 3), shortcut="A")


def resnet20() -> Net:
    return cifar_resnet(20, 5, (17, 19, 3))


def vgg11() -> Net:
    return vgg(11, 5, (33, 35, 2), batch_norm=True)


NETWORKS = {
    "resnet20": Network(resnet20, (17, 19, 3)),
    "vgg11": Network(narrow_vgg11, (33, 35, 2)),
    "windows": Network(windows, (13, 11, 3)),
    "concat": Network(branching, (9, 11, 3)),
    "tall": Network(tall, (83, 5, 2)),
}
ALL = NETWORKS | {"resnet8": Network(resnet8, (9, 11, 3))}

WIDE = Network(vgg11, (33, 35, 2))
"""VGG-11 with all of its filters."""
