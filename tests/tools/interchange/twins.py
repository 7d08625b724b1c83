"""Networks written by hand in PyTorch, and the same ones here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn import layers
from pydtnn.layers import Flatten, Linear, Sequential
from pydtnn.model import Model
from pydtnn.models import create_net

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")
nn = torch.nn


class Digits(nn.Module):
    """The network `cnn` under its own names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(64 * 2 * 3, 128), nn.Linear(128, 5)

    def forward(self, x: Any) -> Any:
        x = self.conv2(self.conv1(x).relu()).relu()
        return self.fc2(self.fc1(nn.functional.max_pool2d(x, 2).flatten(1)).relu())


class BasicBlock(nn.Module):
    """A block of torchvision's ResNets, whose downsampling is defined last."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.downsample = None
        if stride > 1:
            shortcut = nn.Conv2d(channels, filters, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(filters))

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet(nn.Module):
    """ResNet-8 for CIFAR with torchvision's names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(BasicBlock(16, 16, 1))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2))
        self.layer3 = nn.Sequential(BasicBlock(32, 64, 2))
        self.fc = nn.Linear(64, 5)

    def forward(self, x: Any) -> Any:
        x = self.bn1(self.conv1(x)).relu()
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


class Positions(nn.Module):
    """The pixels of a map as a sequence, with attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 6, 4, 2), nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)
        self.projection, self.head = nn.Linear(6, 2), nn.Linear(3 * 4 * 2, 5)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.patches(x).flatten(2).transpose(1, 2))
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.projection(x).flatten(1))


def same_positions() -> Sequential:
    return Sequential(
        layers.Conv2d(6, 4, stride=2, name="patches"),
        layers.Reshape((-1, 6)),
        layers.LayerNorm(name="norm"),
        layers.MultiHeadAttention(3, name="attention"),
        Linear(2, name="projection"),
        Flatten(),
        Linear(5, name="head"),
    )


SHAPE = (8, 10, 3)

TWINS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "cnn": (Digits, lambda: create_net("cnn", 5, SHAPE)),
    "resnet8": (ResNet, lambda: create_net("resnet8", 5, SHAPE)),
    "positions": (Positions, same_positions),
}


def twins(name: str, seed: int = 0) -> tuple[Any, Model]:
    """A module of float64 with random arrays, in evaluation, and a model with other weights."""
    theirs, ours = TWINS[name]
    module, generator = theirs().double().eval(), torch.Generator().manual_seed(seed)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)
            if tensor.ndim > 1:
                tensor.sub_(1)
    return module, Model(ours(), SHAPE, dtype="float64")


def logits(module: Any, x: np.ndarray) -> np.ndarray:
    """Outputs of a module for images (N, H, W, C)."""
    with torch.no_grad():
        return np.asarray(module(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy())
