"""Networks of `pydtnn.models` with equal weights: logits and all gradients equal PyTorch's.

The twins are written out here after the papers, and list their parameters in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.layers import Net, StepContext
from pydtnn.model import Model
from pydtnn.model.graph import Graph
from pydtnn.models import create_net

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")
nn = torch.nn

CLASSES = 5


def conv(
    inputs: int, outputs: int, kernel: Any, stride: int = 1, padding: Any = 0, groups: int = 1
):
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)


def unit(*options: Any, activation: Any = nn.ReLU, eps: float = 1e-5, **further: Any):
    """Convolution, batch norm, activation."""
    first = conv(*options, **further)
    return nn.Sequential(first, nn.BatchNorm2d(first.out_channels, eps), activation())


def classifier(channels: int):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Sum(nn.Module):
    """The body's output and that of the shortcut, added."""

    def __init__(self, body: Any, shortcut: Any = None) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut or nn.Identity()

    def forward(self, x: Any) -> Any:
        return self.body(x) + self.shortcut(x)


class Side(nn.ModuleList):
    """Branches on the same input, side by side."""

    def forward(self, x: Any) -> Any:
        return torch.cat([branch(x) for branch in self], 1)


class DenseBlock(nn.ModuleList):
    """Each layer reads everything before it, concatenated anew."""

    def forward(self, x: Any) -> Any:
        features = [x]
        for layer in self:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


def before(inputs: int, outputs: int, kernel: int):
    """Batch norm, ReLU, convolution."""
    parts = nn.BatchNorm2d(inputs), nn.ReLU(), conv(inputs, outputs, kernel, 1, kernel // 2)
    return nn.Sequential(*parts)


def densenet(stem: Any, channels: int, layers: list[int], growth: int, bottleneck: bool):
    """With bottlenecks, transitions halve the channels."""
    parts = [stem]
    for i, length in enumerate(layers):
        if i:
            left = channels // 2 if bottleneck else channels
            parts += [before(channels, left, 1), nn.AvgPool2d(2)]
            channels = left
        block = DenseBlock()
        for _ in range(length):
            wide = 4 * growth
            block.append(
                nn.Sequential(before(channels, wide, 1), before(wide, growth, 3))
                if bottleneck
                else before(channels, growth, 3)
            )
            channels += growth
        parts.append(block)
    return nn.Sequential(*parts, nn.BatchNorm2d(channels), nn.ReLU(), classifier(channels))


def imagenet_stem(filters: int):
    return nn.Sequential(unit(3, filters, 7, 2, 3), nn.MaxPool2d(3, 2, 1))


def resnext50():
    """32 groups of 4 filters; the small stem."""
    parts, channels = [unit(3, 64, 3, 1, 1)], 64
    for i, blocks in enumerate((3, 4, 6, 3)):
        width, outputs = 128 * 2**i, 256 * 2**i
        for j in range(blocks):
            stride = 2 if i and not j else 1
            body = nn.Sequential(
                unit(channels, width, 1),
                unit(width, width, 3, stride, 1, 32),
                *(conv(width, outputs, 1), nn.BatchNorm2d(outputs)),
            )
            projection = (conv(channels, outputs, 1, stride), nn.BatchNorm2d(outputs))
            shortcut = None if j else nn.Sequential(*projection)
            parts += [Sum(body, shortcut), nn.ReLU()]
            channels = outputs
    return nn.Sequential(*parts, classifier(channels))


def mobilenet_v1():
    """A quarter of the filters."""
    parts, channels = [unit(3, 8, 3, 2, 1)], 8
    strides = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1)
    for filters, stride in zip((16, 32, 32, 64, 64, *[128] * 6, 256, 256), strides, strict=True):
        parts += [unit(channels, channels, 3, stride, 1, channels), unit(channels, filters, 1)]
        channels = filters
    return nn.Sequential(*parts, classifier(channels))


def mobilenet_v2():
    """The form for small images."""

    def relu6(*options: Any):
        return unit(*options, activation=nn.ReLU6)

    parts, channels = [relu6(3, 32, 3, 1, 1)], 32
    for expansion, filters, blocks, first in (
        *((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for j in range(blocks):
            stride, wide = 1 if j else first, expansion * channels
            body = nn.Sequential(
                *([relu6(channels, wide, 1)] if expansion > 1 else []),
                relu6(wide, wide, 3, stride, 1, wide),
                *(conv(wide, filters, 1), nn.BatchNorm2d(filters)),
            )
            parts.append(Sum(body) if j else body)
            channels = filters
    return nn.Sequential(*parts, relu6(320, 1280, 1), classifier(1280))


def slim(*options: Any, **further: Any):
    """A unit of the Inception networks."""
    return unit(*options, eps=1e-3, **further)


class GoogLeNet(nn.Module):
    """With 5 x 5 convolutions and the two auxiliary outputs."""

    def __init__(self) -> None:
        super().__init__()
        half = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.first = nn.Sequential(
            *(slim(3, 64, 7, 2, 3), half, slim(64, 64, 1), slim(64, 192, 3, 1, 1), half),
            self.block(192, 64, 96, 128, 16, 32, 32),
            self.block(256, 128, 128, 192, 32, 96, 64),
            half,
            self.block(480, 192, 96, 208, 16, 48, 64),
        )
        self.head1 = self.head(512)
        self.second = nn.Sequential(
            self.block(512, 160, 112, 224, 24, 64, 64),
            self.block(512, 128, 128, 256, 24, 64, 64),
            self.block(512, 112, 144, 288, 32, 64, 64),
        )
        self.head2 = self.head(528)
        self.third = nn.Sequential(
            self.block(528, 256, 160, 320, 32, 128, 128),
            nn.MaxPool2d(2, 2, ceil_mode=True),
            self.block(832, 256, 160, 320, 32, 128, 128),
            self.block(832, 384, 192, 384, 48, 128, 128),
            classifier(1024),
        )

    @staticmethod
    def block(inputs: int, one: int, before3: int, three: int, before5: int, five: int, pool: int):
        return Side(
            [
                slim(inputs, one, 1),
                nn.Sequential(slim(inputs, before3, 1), slim(before3, three, 3, 1, 1)),
                nn.Sequential(slim(inputs, before5, 1), slim(before5, five, 5, 1, 2)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), slim(inputs, pool, 1)),
            ]
        )

    @staticmethod
    def head(inputs: int):
        linear = nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)
        pooled = nn.AdaptiveAvgPool2d(4), slim(inputs, 128, 1)
        return nn.ModuleList([nn.Sequential(*pooled), nn.Sequential(*linear)])

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        y = self.second(x)
        heads = ((self.head1, x), (self.head2, y))
        channels_last = [(head, head[0](z).permute(0, 2, 3, 1)) for head, z in heads]
        return self.third(y), *(head[1](z.flatten(1)) for head, z in channels_last)


class InceptionV3(nn.Module):
    """With the auxiliary output, which reads the last block of 7 x 1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        parts = [*inception_v3()]
        self.first = nn.Sequential(*parts[:15])
        units = nn.AvgPool2d(5, 3), slim(768, 128, 1), slim(128, 768, 5)
        self.head = nn.Sequential(*units, classifier(768))
        self.rest = nn.Sequential(*parts[15:])

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        return self.rest(x), self.head(x)


def inception_v3():
    """Without the auxiliary output."""
    chain, average = nn.Sequential, nn.AvgPool2d(3, 1, 1)

    def square(inputs: int, pool: int):
        deep = slim(inputs, 64, 1), slim(64, 96, 3, 1, 1), slim(96, 96, 3, 1, 1)
        five = slim(inputs, 48, 1), slim(48, 64, 5, 1, 2)
        pooled = chain(average, slim(inputs, pool, 1))
        return Side([slim(inputs, 64, 1), chain(*five), chain(*deep), pooled])

    def lines(first: int, *shapes: tuple[str, int, int]):
        """A 1 x 1 unit, then units of 1 x 7 ("row") or 7 x 1 taps."""
        sizes = {"row": ((1, 7), 1, (0, 3)), "column": ((7, 1), 1, (3, 0))}
        rest = (slim(inputs, outputs, *sizes[kind]) for kind, inputs, outputs in shapes)
        return chain(slim(768, first, 1), *rest)

    def wide(inputs: int):
        def both(own: int):
            return Side([slim(own, 384, (1, 3), 1, (0, 1)), slim(own, 384, (3, 1), 1, (1, 0))])

        return Side(
            [
                slim(inputs, 320, 1),
                chain(slim(inputs, 384, 1), both(384)),
                chain(slim(inputs, 448, 1), slim(448, 384, 3, 1, 1), both(384)),
                chain(average, slim(inputs, 192, 1)),
            ]
        )

    def crossed(w: int):
        return Side(
            [
                slim(768, 192, 1),
                lines(w, ("row", w, w), ("column", w, 192)),
                lines(w, ("column", w, w), ("row", w, w), ("column", w, w), ("row", w, 192)),
                chain(average, slim(768, 192, 1)),
            ]
        )

    half = nn.MaxPool2d(3, 2)
    narrow = chain(slim(288, 64, 1), slim(64, 96, 3, 1, 1), slim(96, 96, 3, 2))
    last = chain(lines(192, ("row", 192, 192), ("column", 192, 192)), slim(192, 192, 3, 2))
    return chain(
        *(slim(3, 32, 3, 2), slim(32, 32, 3), slim(32, 64, 3, 1, 1), half),
        *(slim(64, 80, 1), slim(80, 192, 3), half),
        *(square(192, 32), square(256, 64), square(288, 64)),
        Side([slim(288, 384, 3, 2), narrow, half]),
        *(crossed(w) for w in (128, 160, 160, 192)),
        Side([chain(slim(768, 192, 1), slim(192, 320, 3, 2)), last, half]),
        *(wide(1280), wide(2048), classifier(2048)),
    )


NETWORKS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], Callable[[], Any]]] = {
    "densenet40": (
        "densenet40",
        (8, 9, 3),
        {"growth": 3},
        lambda: densenet(conv(3, 16, 3, 1, 1), 16, [12, 12, 12], 3, False),
    ),
    "densenet121": (
        "densenet121",
        (64, 67, 3),
        {"growth": 8},
        lambda: densenet(imagenet_stem(16), 16, [6, 12, 24, 16], 8, True),
    ),
    "resnext50": ("resnext50", (16, 18, 3), {}, resnext50),
    "mobilenet_v1": ("mobilenet_v1", (64, 67, 3), {"width": 0.25}, mobilenet_v1),
    "mobilenet_v2": ("mobilenet_v2", (15, 18, 3), {"dropout": 0.0}, mobilenet_v2),
    "googlenet": (
        "googlenet",
        (65, 67, 3),
        {"kernel": 5, "dropout": 0.0, "auxiliary": True, "auxiliary_dropout": 0.0},
        GoogLeNet,
    ),
    "inception_v3": (
        "inception_v3",
        (299, 299, 3),
        {"dropout": 0.0, "auxiliary": True},
        InceptionV3,
    ),
}


def order(net: Net, shape: tuple[int, ...]) -> list[str]:
    """Names of the parameters in the order in which the layers are written, before fusion."""
    graph = Graph([shape], backend=create_backend("numpy"), dtype="float64")
    graph.add(net, *graph.inputs)
    return [p.name for node in graph.nodes for p in node.layer.parameters]


def channels_second(x: np.ndarray) -> Any:
    return torch.from_numpy(x.transpose(0, 3, 1, 2).copy() if x.ndim == 4 else x.copy())


@pytest.mark.parametrize("case", NETWORKS)
def test_logits_and_all_gradients_are_equal(case: str) -> None:
    name, shape, options, make = NETWORKS[case]
    names = order(create_net(name, CLASSES, shape, **options), shape)
    model = Model(create_net(name, CLASSES, shape, **options), shape, dtype="float64")
    twin, rng = make(), np.random.default_rng(0)
    theirs = dict(zip(names, twin.parameters(), strict=True))
    for key, tensor in theirs.items():
        values = model.parameters[key].master
        values += 0.1 * rng.normal(size=values.shape) * np.abs(values).max()
        assert tensor.shape == channels_second(values).shape, key
        tensor.data = channels_second(values)
    model.refresh()

    n = 2 if name == "inception_v3" else 3  # large images
    x = rng.normal(size=(n, *shape))
    y, residuals = model.forward(x, StepContext(training=True, samples=np.arange(n)))
    ours, expected = y, twin(channels_second(x))
    if not isinstance(y, tuple):
        ours, expected = (y,), (expected,)
    dys = tuple(rng.normal(size=part.shape) for part in ours)
    torch.autograd.backward(expected, [torch.from_numpy(dy) for dy in dys])
    model.backward(dys if isinstance(y, tuple) else dys[0], residuals)

    pairs = {f"output{i}": (a, b) for i, (a, b) in enumerate(zip(ours, expected, strict=True))}
    for key, tensor in theirs.items():
        gradient = model.parameters[key].grad
        pairs[key] = (channels_second(gradient).numpy(), tensor.grad)
    for key, (own, other) in pairs.items():
        other = other.detach().numpy()
        # 1e-11: shifts before a convolution that is normalised have the gradient 0
        assert np.abs(own - other).max() < 1e-9 * np.abs(other).max() + 1e-11, key
