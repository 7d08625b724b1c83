"""Kernels that move data: each as a call and the bytes that it has to read and write, each once.

As in training, coefficients beside 16-bit arrays are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from pydtnn.kernels import Backend, PoolGeometry
from pydtnn.kernels.deferred import Deferred, Term
from pydtnn.kernels.dtypes import arithmetic

SHAPES = {"warm": (64, 32, 32, 16), "cold": (1024, 32, 32, 64)}
POOLS = {
    "2x2 stride 2": PoolGeometry((32, 32), (2, 2), (2, 2), ((0, 0), (0, 0)), 1),
    "3x3 stride 2": PoolGeometry((32, 32), (3, 3), (2, 2), ((1, 1), (1, 1)), 1),
}
ACTIVATIONS = ("relu", "leaky_relu", "elu", "sigmoid", "tanh", "gelu", "silu", "log", "arctan")

Case = tuple[str, int, Callable[[], object]]
"""Name, bytes moved, call."""


class Arrays:
    """Tensors of one shape, of module `xp`: input, gradient, output, state of an optimizer."""

    def __init__(self, shape: tuple[int, ...], dtype: str, xp: Any = np) -> None:
        rng = np.random.default_rng(0)
        self.shape, self.xp = shape, xp
        self.x = xp.asarray(rng.standard_normal(shape, "float32").astype(dtype))
        self.dy, self.out = self.x[::-1].copy(), xp.zeros_like(self.x)
        self.state = [xp.zeros(prod(shape), dtype) for _ in range(2)]
        self.size = self.x.nbytes
        self.coefficients = arithmetic(dtype)


def norm_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Batch norm in its four passes, group and layer norm."""
    norm, channels, n = backend.norm, a.shape[-1], a.size
    sums, two = a.xp.zeros(1 + 2 * channels), a.xp.zeros((2, channels))
    one = a.xp.ones(channels, a.coefficients)
    yield "statistics", n, lambda: norm.statistics(a.x, out=sums)
    yield "normalize", 2 * n, lambda: norm.normalize(a.x, one, one, out=a.out)
    yield (
        "backward_statistics",
        2 * n,
        lambda: norm.backward_statistics(a.x, a.dy, one, one, out=two),
    )
    yield (
        "backward_normalize",
        3 * n,
        lambda: norm.backward_normalize(a.x, a.dy, one, one, one, out=a.out),
    )
    for name, view, groups in (
        ("group", (a.shape[0], -1, channels), 4),
        ("layer", (-1, 1, 16 * channels), 1),
    ):
        x, dy, out = (array.reshape(view) for array in (a.x, a.dy, a.out))
        mean, inv_std = a.xp.zeros((2, len(x), groups))
        weights = a.xp.ones((4, x.shape[2]), a.coefficients)

        def forward(x=x, out=out, mean=mean, inv_std=inv_std, w=weights, groups=groups):
            norm.group_forward(x, w[0], w[1], groups, 1e-5, out=out, mean=mean, inv_std=inv_std)

        def backward(x=x, dy=dy, out=out, mean=mean, r=inv_std, w=weights, groups=groups):
            norm.group_backward(x, dy, w[0], groups, mean, r, out=out, dgamma=w[2], dbeta=w[3])

        yield f"{name} forward", 2 * n, forward
        yield f"{name} backward", 3 * n, backward


def fused_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Deferred arrays: batch norm, with ReLU, with the sum of a residual block; and their gate."""
    fused, n, channels = backend.fused, a.size, a.shape[-1]
    half, sums = a.xp.full(channels, 0.5, a.coefficients), a.xp.zeros((3, channels))
    norm = Deferred(Term(a.x, half, half), shift=half, relu=True)
    block = Deferred(Term(a.x, half, half), Term(a.dy), shift=half, relu=True)
    yield "evaluate, 1 term", 2 * n, lambda: fused.evaluate(norm, out=a.out)
    yield "evaluate, 2 terms", 3 * n, lambda: fused.evaluate(block, out=a.out)
    yield "gate, 1 term", 3 * n, lambda: fused.gate(a.dy, norm, out=a.out, sums=sums[:2])
    yield "gate, 2 terms", 3 * n, lambda: fused.gate(a.dy, block, out=a.out, sums=sums)


def pool_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Maximum and mean over windows, and the global mean."""
    pool, batch, channels = backend.pool, a.shape[0], a.shape[-1]
    for name, pool_geometry in POOLS.items():
        g = replace(pool_geometry, channels=channels)
        small = (batch, *g.output, channels)
        y, index = a.xp.zeros(small, a.x.dtype), a.xp.zeros(small, "uint8")
        both = y.nbytes + index.nbytes
        yield (
            f"max {name}",
            a.size + both,
            lambda g=g, y=y, i=index: pool.max_forward(a.x, g, out=y, index=i),
        )
        yield (
            f"max {name} backward",
            a.size + both,
            lambda g=g, y=y, i=index: pool.max_backward(y, i, g, out=a.out),
        )
        yield (
            f"average {name}",
            a.size + y.nbytes,
            lambda g=g, y=y: pool.average_forward(a.x, g, out=y),
        )
        yield (
            f"average {name} backward",
            a.size + y.nbytes,
            lambda g=g, y=y: pool.average_backward(y, g, out=a.out),
        )
    top = a.xp.zeros((batch, 1, 1, channels), a.x.dtype)
    yield "global average", a.size, lambda: pool.adaptive_forward(a.x, out=top)
    yield "global average backward", a.size, lambda: pool.adaptive_backward(top, out=a.out)


def elementwise_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Activations, the sum of two arrays, softmax, conversion to another type and back."""
    kernels = backend.elementwise
    yield "add", 3 * a.size, lambda: kernels.add(a.x, a.dy, out=a.out)
    for name in ACTIVATIONS:
        yield (
            name,
            2 * a.size,
            lambda name=name: kernels.forward(name, a.x, out=a.out, alpha=0.1),
        )
    for name in ("relu", "gelu"):
        yield (
            f"{name} backward",
            3 * a.size,
            lambda name=name: kernels.backward(name, a.dy, a.x, out=a.out),
        )
    x, dy, out = (array.reshape(-1, 1024) for array in (a.x, a.dy, a.out))
    yield "softmax of 1024", 2 * a.size, lambda: kernels.softmax_forward(x, out=out)
    yield "softmax backward", 3 * a.size, lambda: kernels.softmax_backward(dy, x, out=out)
    other = a.xp.zeros(a.shape, "bfloat16" if a.x.dtype == "float32" else "float32")
    both = a.size + other.nbytes
    yield f"convert to {other.dtype}", both, lambda: kernels.convert(a.x, out=other)
    yield f"convert from {other.dtype}", both, lambda: kernels.convert(other, out=a.out)


def bias_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """The gradient of a bias: sums of columns."""
    dy = a.dy.reshape(-1, 1024)
    out = a.xp.zeros(1024, a.coefficients)
    yield "gradient of 1024", a.size, lambda: backend.linear.backward_bias(dy, out=out)


def loss_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Cross-entropy and the squared error with their gradients."""
    loss = backend.loss
    logits, out = a.x.reshape(-1, 1024), a.out.reshape(-1, 1024)
    target = a.xp.zeros(len(logits), "int64")
    yield (
        "cross_entropy of 1024",
        2 * a.size,
        lambda: loss.cross_entropy(logits, target, 0.0, 1.0, out=out),
    )
    weights = a.xp.ones(1024, a.coefficients)
    yield (
        "cross_entropy of 1024, weighted",
        2 * a.size,
        lambda: loss.weighted_cross_entropy(logits, target, weights, 255, 0.1, 1.0, out=out),
    )
    yield "squared_error", 3 * a.size, lambda: loss.squared_error(a.x, a.dy, 1.0, out=a.out)


def update_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """The optimizers and what else is done to whole gradients; all of that in float32 or 64."""
    if a.x.dtype != a.coefficients:
        return
    update, w, g, (m, v) = backend.update, a.out.reshape(-1), a.dy.reshape(-1), a.state
    n, one, go = a.size, a.xp.ones(1), a.xp.ones(1)
    yield (
        "sgd with momentum",
        5 * n,
        lambda: update.sgd(w, g, v, lr=0.0, decay=0.1, momentum=0.9, nesterov=False),
    )
    yield (
        "adam",
        7 * n,
        lambda: update.adam(
            w, g, m, v, lr=0.0, decay=0.1, step=1, beta1=0.9, beta2=0.999, epsilon=1e-8,
            decoupled=True,
        ),
    )  # fmt: skip
    yield (
        "adagrad",
        5 * n,
        lambda: update.adagrad(w, g, v, lr=0.0, decay=0.1, initial=0.1, epsilon=1e-8),
    )
    yield "lion", 5 * n, lambda: update.lion(w, g, m, lr=0.0, decay=0.1, beta1=0.9, beta2=0.99)
    yield "squared_norm", n, lambda: update.squared_norm(g)
    yield "scale", 2 * n, lambda: update.scale(g, 1.0)
    yield "unscale", 2 * n, lambda: update.unscale(g, one, go)


def random_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Dropout."""
    samples = a.xp.arange(a.shape[0])
    yield (
        "dropout",
        2 * a.size,
        lambda: backend.random.dropout(a.x, 0.5, 1, 2, 3, samples, out=a.out),
    )


def image_cases(backend: Backend, a: Arrays) -> Iterator[Case]:
    """Augmentation and normalisation of raw images, on devices that do it."""
    if backend.images is None:
        return
    images, n = backend.images, a.size // (32 * 32 * 3 * a.x.itemsize)
    x = a.xp.zeros((n, 32, 32, 3), "uint8")
    words = a.xp.asarray(np.random.default_rng(0).integers(2**32, size=(n, 8), dtype="uint32"))
    out = a.xp.zeros(x.shape, a.x.dtype)
    fill, scale = np.zeros(3, "uint8"), np.ones(3)
    changes = [("crop", 4), ("flip", 0)]
    yield (
        "crop, flip, normalise",
        x.nbytes + words.nbytes + out.nbytes,
        lambda: images.prepare(x, words, changes, fill, scale, scale, out=out),
    )


FAMILIES = {
    "norm": norm_cases,
    "fused": fused_cases,
    "pool": pool_cases,
    "elementwise": elementwise_cases,
    "loss": loss_cases,
    "update": update_cases,
    "random": random_cases,
    "bias": bias_cases,
    "images": image_cases,
}
