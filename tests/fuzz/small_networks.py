"""Random networks, small and of every kind that ranks treat differently."""

from __future__ import annotations

import numpy as np

from pydtnn.layers import (
    ELU,
    Add,
    AvgPool2d,
    BatchNorm,
    Branches,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    GroupNorm,
    Identity,
    LayerNorm,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Net,
    ReLU,
    Residual,
    Sequential,
    Tanh,
)


def random_net(seed: int, shape: tuple[int, ...], outputs: int, of_vectors: bool) -> Net:
    """Make the network of a seed: of new layers, but the same for every rank.

    `of_vectors` says whether vectors may be normalised together: a shard of one sample has nothing
    to divide by.
    """
    return _Drawn(np.random.default_rng(seed), of_vectors).net(shape, outputs)


class _Drawn:
    """A network under way, with the size and the channels of its last output."""

    def __init__(self, rng: np.random.Generator, of_vectors: bool) -> None:
        self.rng, self.of_vectors = rng, of_vectors
        self.parts: list[Net] = []
        self.size = self.channels = 1

    def net(self, shape: tuple[int, ...], outputs: int) -> Net:
        if len(shape) == 3:
            self.size, self.channels = min(shape[:2]), shape[2]
            for _ in range(self.rng.integers(1, 3)):
                self.images()
            self.parts.append(GlobalAvgPool2d() if self.draws(0.5) else Flatten())
        self.size = 1
        for _ in range(self.rng.integers(0, 3)):
            self.channels = int(self.rng.integers(1, 9))
            self.parts += self.in_any_order(Linear(self.channels))
            self.parts += [Dropout(0.3)] * self.draws(0.3)
        return Sequential(*self.parts, Linear(outputs))

    def draws(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def images(self) -> None:
        """A convolution and what follows it."""
        stride = 2 if self.draws(0.3) else 1
        conv = Conv2d(
            (filters := 2 * int(self.rng.integers(1, 4))),
            int(self.rng.choice([1, 3, 5])),
            stride=stride,
            padding="same",
            groups=2 if self.channels % 2 == 0 and self.draws(0.3) else 1,
            bias=self.draws(0.5),
        )
        self.size, self.channels = -(-self.size // stride), filters
        self.parts += self.in_any_order(conv)
        draw = self.rng.random()
        if draw < 0.2:
            self.parts += [Residual(self.body()), self.activation()]
        elif draw < 0.4:
            other = Identity() if self.draws(0.5) else Conv2d(self.channels, 1)
            merge = Add() if self.draws(0.5) else Concat()
            self.parts.append(Branches(self.body(self.activation()), other, merge=merge))
            self.channels *= 1 if isinstance(merge, Add) else 2
        if self.size >= 4 and self.draws(0.4):
            self.parts.append((MaxPool2d if self.draws(0.5) else AvgPool2d)(2))
            self.size //= 2
        self.parts += [Dropout(0.2)] * self.draws(0.3)

    def body(self, *others: Net) -> Net:
        return Sequential(Conv2d(self.channels, 3, padding="same"), *self.norm(), *others)

    def in_any_order(self, linear: Net) -> list[Net]:
        """A linear layer, then a norm and an activation, mostly in this order."""
        norm, activation = self.norm(), [self.activation()]
        if self.draws(0.7):
            return [linear, *norm, *activation]
        if self.draws(0.5):
            return [linear, *activation, *norm]
        return [linear, *activation, *norm, self.activation()]

    def activation(self) -> Net:
        return (ReLU, Tanh, LeakyReLU, ELU)[self.rng.integers(4)]()

    def norm(self) -> list[Net]:
        draw = self.rng.random()
        if draw < 0.5:
            fits = self.size > 1 or self.of_vectors
            return [BatchNorm(momentum=float(self.rng.choice([0.1, 0.5, 1.0])))] if fits else []
        if draw >= 0.75:
            return []
        return [LayerNorm() if draw >= 0.65 else GroupNorm(2 if self.channels % 2 == 0 else 1)]
