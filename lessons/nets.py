"""The arithmetic that lessons share: layers with their gradients, a network, and its data.

Gradients are those of the sum of losses over samples; who divides by the batch is the lesson's
concern. Arrays are float64, so that results can be compared to the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray

BATCH, STEPS, RATE = 12, 6, 0.2
SIDE, HIDDEN, CLASSES = 8, 12, 4
SIZES = [SIDE * SIDE, 2 * HIDDEN, HIDDEN, CLASSES]
"""Features after each layer of the network of three linear layers."""


def batch(step: int, samples: int = BATCH) -> tuple[Array, Array]:
    """Return images of waves in four directions, (N, 8, 8), and the directions, (N,)."""
    rng = np.random.default_rng(step)
    labels = rng.integers(CLASSES, size=samples)
    angle = np.pi * labels / CLASSES
    i, j = np.mgrid[:SIDE, :SIDE]
    along = np.cos(angle)[:, None, None] * i + np.sin(angle)[:, None, None] * j  # (N, 8, 8)
    phase = rng.uniform(0, 2 * np.pi, (samples, 1, 1))
    return np.sin(2 * along + phase) + 0.1 * rng.standard_normal(along.shape), labels


def parameters(sizes: list[int] = SIZES, seed: int = 0) -> list[Array]:
    """Return w (I, O) and b (O,) of each linear layer."""
    rng, result = np.random.default_rng(seed), []
    for inputs, outputs in pairwise(sizes):
        result.append(rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs))
        result.append(np.zeros(outputs))
    return result


def linear(x: Array, w: Array, b: Array) -> Array:
    """(N, I), (I, O), (O,) -> (N, O)."""
    return x @ w + b


def linear_backward(dy: Array, x: Array, w: Array) -> tuple[Array, Array, Array]:
    """(N, O), (N, I), (I, O) -> gradients of x (N, I), w (I, O), b (O,)."""
    return dy @ w.T, x.T @ dy, dy.sum(axis=0)


def cross_entropy(scores: Array, labels: Array) -> tuple[float, Array]:
    """(N, K), (N,) -> the sum of the losses of N samples, and its gradient (N, K)."""
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -np.log(p[rows, labels]).sum()
    p[rows, labels] -= 1
    return float(loss), p


def forward(layers: Any, x: Array, labels: Array) -> tuple[float, list[Array], Array]:
    """Return the sum of losses, the inputs (N, I) of each layer, and the gradient of the scores."""
    inputs = [x.reshape(len(x), -1)]  # (N, 64)
    for w, b in layers[:-1]:
        inputs.append(np.maximum(linear(inputs[-1], w, b), 0))  # (N, O), after ReLU
    loss, dy = cross_entropy(linear(inputs[-1], *layers[-1]), labels)
    return loss, inputs, dy


def gradients(params: list[Array], x: Array, labels: Array) -> tuple[float, list[Array]]:
    """Return the sum of losses of a network of linear layers and ReLU, and its gradients."""
    layers = list(zip(params[::2], params[1::2], strict=True))
    loss, inputs, dy = forward(layers, x, labels)
    result: list[Array] = []
    for (w, _), inp in zip(reversed(layers), reversed(inputs), strict=True):
        dx, dw, db = linear_backward(dy, inp, w)
        result[:0] = [dw, db]
        dy = dx * (inp > 0)  # of the ReLU before this layer
    return loss, result


def serial(size: int = 1) -> Array:
    """Return the parameters of serial training, (n,), whatever the number of ranks."""
    params = parameters()
    for step in range(STEPS):
        _, grads = gradients(params, *batch(step))
        params = [p - RATE * g / BATCH for p, g in zip(params, grads, strict=True)]
    return join(params)


def descend(rank: Any, allreduce: Callable[[Array], Array]) -> Array:
    """Sum what would be gradients, P equal parts of which each rank has one, in each step."""
    result = join(parameters())
    for step in range(STEPS):
        gradient = np.random.default_rng(step).standard_normal((12, len(result)))  # (12, n)
        result = result - RATE * allreduce(gradient[rank.rank :: rank.size].sum(axis=0))
    return result


def part(array: Array, rank: int, size: int, axis: int = 0) -> Array:
    """Return a rank's even part of an array along an axis."""
    return np.array_split(array, size, axis)[rank]


def join(arrays: list[Array]) -> Array:
    """Return arrays as one of one dimension."""
    return np.concatenate([array.reshape(-1) for array in arrays])


def split(flat: Array, like: list[Array]) -> list[Array]:
    """Return the inverse of `join`: views of an array of one dimension, shaped as those."""
    ends = np.cumsum([array.size for array in like])
    parts = np.split(flat, ends[:-1])
    return [p.reshape(array.shape) for p, array in zip(parts, like, strict=True)]


def cut(arrays: list[Array], size: int) -> Array:
    """Return arrays of n elements as (P, n / P), the last part padded by zeros."""
    flat = join(arrays)
    length = -(-flat.size // size)
    return np.pad(flat, (0, size * length - flat.size)).reshape(size, length)


CHANNELS = 12


def conv(x: Array, w: Array) -> Array:
    """(N, H + 2, W + 2, I) with a frame around, (3, 3, I, O) -> (N, H, W, O)."""
    h, width = x.shape[1] - 2, x.shape[2] - 2
    return sum(x[:, i : i + h, j : j + width] @ w[i, j] for i in range(3) for j in range(3))


def conv_backward(dy: Array, x: Array, w: Array) -> Array:
    """(N, H, W, O), (N, H + 2, W + 2, I), (3, 3, I, O) -> gradient of w."""
    h, width = dy.shape[1:3]
    dw = np.empty_like(w)
    for i in range(3):
        for j in range(3):
            dw[i, j] = np.tensordot(x[:, i : i + h, j : j + width], dy, ([0, 1, 2], [0, 1, 2]))
    return dw


def turned(w: Array) -> Array:
    """(3, 3, I, O) -> (3, 3, O, I): filters whose convolution with dy is the gradient of x."""
    return w[::-1, ::-1].transpose(0, 1, 3, 2)


def frame(x: Array) -> Array:
    """(N, H, W, C) -> (N, H + 2, W + 2, C) with zeros around."""
    return np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))


def filters(seed: int = 0) -> list[Array]:
    """Return two filters (3, 3, I, O), and w (C, 4) and b (4,) of a linear layer."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((3, 3, 1, CHANNELS)) / 3
    second = rng.standard_normal((3, 3, CHANNELS, CHANNELS)) / np.sqrt(4.5 * CHANNELS)
    return [first, second, *parameters([CHANNELS, CLASSES], seed)]


SEQUENCES, TOKENS, WORDS, WIDTH, HEADS = 4, 12, 8, 24, 12


def sequences(step: int) -> tuple[Array, Array]:
    """Return words (N, T), and for each the one before it (the first its own), (N, T)."""
    words = np.random.default_rng(step).integers(WORDS, size=(SEQUENCES, TOKENS))
    return words, words[:, [0, *range(TOKENS - 1)]]


def embedding() -> Array:
    """Return a vector for each word and each position, (V + T, D)."""
    return np.random.default_rng(1).standard_normal((WORDS + TOKENS, WIDTH)) / 2


def square(seed: int, rows: int = WIDTH, columns: int = WIDTH) -> Array:
    """Return a matrix (rows, columns) that keeps the size of vectors."""
    return np.random.default_rng(seed).standard_normal((rows, columns)) / np.sqrt(rows)


def heads(x: Array) -> Array:
    """(N, T, h d) -> (N, h, T, d), with heads of d = D / HEADS."""
    n, t, width = x.shape
    size = WIDTH // HEADS
    return x.reshape(n, t, width // size, size).transpose(0, 2, 1, 3)


def joined(x: Array) -> Array:
    """(N, h, T, d) -> (N, T, h d)."""
    n, _, t, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(n, t, -1)


def attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Causal attention of (N, h, T, d) each: the output, and the weights (N, h, T, T)."""
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])  # (N, h, T, T)
    scores = np.where(np.tri(q.shape[2], dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v, p


def attention_backward(dy: Array, q: Array, k: Array, v: Array, p: Array) -> list[Array]:
    """Return the gradients of q, k and v, (N, h, T, d) each."""
    dp = dy @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) / np.sqrt(q.shape[-1])  # (N, h, T, T)
    return [ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ dy]


def outer(x: Array, dy: Array) -> Array:
    """(N, T, I), (N, T, O) -> gradient (I, O) of the w of y = x w."""
    return np.tensordot(x, dy, ([0, 1], [0, 1]))


def word_loss(y: Array, table: Array, targets: Array) -> tuple[float, Array, Array]:
    """Return the loss of (N, T, D) scored by words (V, D), and the gradients of both."""
    scores = (y @ table.T).reshape(-1, len(table))  # (N T, V)
    loss, d = cross_entropy(scores, targets.reshape(-1))
    d = d.reshape(*y.shape[:2], -1)  # (N, T, V)
    return loss, d @ table, outer(d, y)
