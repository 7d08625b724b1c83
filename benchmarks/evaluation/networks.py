"""The networks that are compared, as lists of layers that every adapter builds in its framework.

A layer is a list: its kind and its numbers.

=============================== ==================================================================
``conv filters kernel stride``  a convolution without bias, padded by half of the kernel
``bn``                          batch norm with the statistics of a rank's samples, epsilon 1e-5
``relu``, ``gap``, ``flatten``  ReLU; the mean of each map; all values as one axis
``maxpool size``                the maximum of squares that do not overlap
``dense units``                 a product with bias
``residual body shortcut``      the sum of two lists of layers; an empty one is the identity
=============================== ==================================================================

Weights are those of the layers in this order, a residual's body first: of a convolution (height,
width, input channels, filters), of batch norm gamma and beta, of a product (inputs, units) and the
bias. They are drawn here, so that no framework's initialisation is part of the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np

Layers = Sequence[Sequence[Any]]


class Network(NamedTuple):
    """A network, the shape of its samples (height, width, channels), and the rate of training."""

    layers: Layers
    shape: tuple[int, int, int]
    rate: float


def _conv(filters: int, kernel: int = 3, stride: int = 1, *, relu: bool = True) -> Layers:
    return [["conv", filters, kernel, stride], ["bn"], *([["relu"]] if relu else [])]


def _resnet(blocks: int) -> Layers:
    layers, channels = [*_conv(16)], 16
    for filters in (16, 32, 64):
        for block in range(blocks):
            stride = 2 if filters > 16 and block == 0 else 1
            body = [*_conv(filters, 3, stride), *_conv(filters, relu=False)]
            shortcut = _conv(filters, 1, stride, relu=False) if channels != filters else []
            layers += [["residual", body, shortcut], ["relu"]]
            channels = filters
    return [*layers, ["gap"], ["dense", 10]]


def _vgg11() -> Layers:
    layers: list[Sequence[Any]] = []
    for item in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512):
        layers += _conv(item) if item else [["maxpool", 2]]
    return [*layers, ["gap"], ["dense", 10]]


def _plain(filters: Sequence[int], units: int) -> Layers:
    """Return convolutions without batch norm, after which maps are halved, and two products."""
    layers: list[Sequence[Any]] = []
    for number in filters:
        layers += [["conv", number, 3, 1], ["relu"], ["maxpool", 2]]
    return [*layers, ["flatten"], ["dense", units], ["relu"], ["dense", 10]]


RATE = 0.0002
"""Of deep networks; with 0.002, differences of rounding grow threefold a step."""

NETWORKS = {
    "mlp": Network(
        [["flatten"], ["dense", 1024], ["relu"], ["dense", 1024], ["relu"], ["dense", 10]],
        (28, 28, 1),
        0.002,
    ),
    "digits": Network(
        [
            ["conv", 16, 3, 1],
            ["relu"],
            ["conv", 32, 3, 2],
            ["relu"],
            ["flatten"],
            ["dense", 64],
            ["relu"],
            ["dense", 10],
        ],
        (8, 8, 1),
        0.02,
    ),
    "cnn": Network(_plain((32, 64, 64), 128), (32, 32, 3), 0.01),
    "resnet8": Network(_resnet(1), (32, 32, 3), RATE),
    "resnet20": Network(_resnet(3), (32, 32, 3), RATE),
    "resnet44": Network(_resnet(7), (32, 32, 3), RATE),
    "vgg11": Network(_vgg11(), (32, 32, 3), RATE),
}
"""Networks by name; ResNets are those of He et al., 2016, VGG-11 has batch norm and one product."""

CLASSES = 10


def weights(network: Network, seed: int = 0) -> list[np.ndarray]:
    """Return the initial weights: He et al., 2015, for layers before ReLU."""
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        scale = sqrt(2 / prod(shape[:-1]))
        return (scale * rng.standard_normal(shape)).astype("float32")

    def visit(layers: Layers, shape: tuple[int, ...]) -> tuple[int, ...]:
        for kind, *numbers in layers:
            if kind == "conv":
                filters, kernel, stride = numbers
                found.append(draw((kernel, kernel, shape[-1], filters)))
                shape = (-(-shape[0] // stride), -(-shape[1] // stride), filters)
            elif kind == "bn":
                found.extend((np.ones(shape[-1], "float32"), np.zeros(shape[-1], "float32")))
            elif kind == "dense":
                found.extend((draw((shape[0], numbers[0])), np.zeros(numbers[0], "float32")))
                shape = (numbers[0],)
            elif kind == "maxpool":
                shape = (shape[0] // numbers[0], shape[1] // numbers[0], shape[2])
            elif kind in ("gap", "flatten"):
                shape = (shape[-1] if kind == "gap" else prod(shape),)
            elif kind == "residual":
                after = visit(numbers[0], shape)
                visit(numbers[1], shape)
                shape = after
        return shape

    visit(network.layers, network.shape)
    return found


def samples(network: Network, number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return images with a class-dependent mean, so that a loss decreases, and their labels."""
    rng = np.random.default_rng(seed + 1)
    labels = rng.integers(0, CLASSES, number)
    means = rng.standard_normal((CLASSES, *network.shape)).astype("float32")
    images = rng.standard_normal((number, *network.shape)).astype("float32") + 0.2 * means[labels]
    return images, labels


def parameters(network: Network) -> int:
    """Return the number of parameters."""
    return sum(one.size for one in weights(network))


def walk(layers: Layers) -> Iterator[Sequence[Any]]:
    """Yield all layers, those of a residual before it."""
    for layer in layers:
        if layer[0] == "residual":
            yield from walk(layer[1])
            yield from walk(layer[2])
        yield layer
