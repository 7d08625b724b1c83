"""Convolutions, products and attention that are measured: geometries, our calls and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.common.report import WITH_TORCH
from pydtnn.kernels import Backend, ConvGeometry
from pydtnn.layers.masks import documents, first_positions, positions_seen

if WITH_TORCH:
    import torch

Call = Callable[[], object]


class Case(NamedTuple):
    """One operation on the same operands in every way that can compute it.

    `ours` by algorithm, `theirs` None without PyTorch; `operands` is all that the calls read or
    write, but for what PyTorch allocates: its calls return it.
    """

    name: str
    direction: str
    flops: int
    ours: dict[str, Call]
    theirs: Call | None
    operands: tuple[np.ndarray, ...]


def conv(
    size: int,
    channels: int,
    filters: int,
    kernel: int,
    stride: int = 1,
    padding: int = 0,
    **more: int,
) -> ConvGeometry:
    """A square geometry; `more` are dilation and groups."""
    dilation, groups = more.get("dilation", 1), more.get("groups", 1)
    pair = (padding, padding)
    return ConvGeometry(
        (size, size), (kernel, kernel), (stride, stride), (pair, pair), (dilation, dilation),
        channels, filters, groups,
    )  # fmt: skip


CONVOLUTIONS = {  # name: (batch, geometry)
    "resnet44 first": (64, conv(32, 3, 16, 3, padding=1)),
    "resnet44 16": (64, conv(32, 16, 16, 3, padding=1)),
    "resnet44 32": (64, conv(16, 32, 32, 3, padding=1)),
    "resnet44 64": (64, conv(8, 64, 64, 3, padding=1)),
    "resnet44 16-32 /2": (64, conv(32, 16, 32, 3, 2, 1)),
    "resnet44 32-64 /2": (64, conv(16, 32, 64, 3, 2, 1)),
    "resnet44 1x1 16-32 /2": (64, conv(32, 16, 32, 1, 2)),
    "resnet44 1x1 32-64 /2": (64, conv(16, 32, 64, 1, 2)),
    "vgg16 first": (64, conv(32, 3, 64, 3, padding=1)),
    "vgg16 64": (16, conv(32, 64, 64, 3, padding=1)),
    "vgg16 64-128": (16, conv(16, 64, 128, 3, padding=1)),
    "vgg16 128": (16, conv(16, 128, 128, 3, padding=1)),
    "vgg16 128-256": (16, conv(8, 128, 256, 3, padding=1)),
    "vgg16 256": (16, conv(8, 256, 256, 3, padding=1)),
    "vgg16 256-512": (64, conv(4, 256, 512, 3, padding=1)),
    "vgg16 512 4x4": (64, conv(4, 512, 512, 3, padding=1)),
    "vgg16 512 2x2": (64, conv(2, 512, 512, 3, padding=1)),
    "resnet18 first 7x7 /2": (2, conv(224, 3, 64, 7, 2, 3)),
    "resnet18 64": (4, conv(56, 64, 64, 3, padding=1)),
    "resnet18 128": (8, conv(28, 128, 128, 3, padding=1)),
    "resnet18 256": (8, conv(14, 256, 256, 3, padding=1)),
    "resnet18 512": (8, conv(7, 512, 512, 3, padding=1)),
    "cnn first": (64, conv(28, 1, 32, 3)),
    "cnn 32-64": (64, conv(26, 32, 64, 3)),
    "5x5": (64, conv(12, 20, 50, 5)),
    "1x1 64": (64, conv(16, 64, 64, 1)),
    "depthwise 3x3": (16, conv(32, 64, 64, 3, padding=1, groups=64)),
    "depthwise 112x112": (8, conv(112, 32, 32, 3, padding=1, groups=32)),
    "depthwise 112x112 /2": (8, conv(112, 64, 64, 3, 2, 1, groups=64)),
    "depthwise 56x56": (8, conv(56, 128, 128, 3, padding=1, groups=128)),
    "depthwise 28x28 /2": (8, conv(28, 256, 256, 3, 2, 1, groups=256)),
    "depthwise 14x14": (32, conv(14, 512, 512, 3, padding=1, groups=512)),
    "depthwise 7x7": (32, conv(7, 1024, 1024, 3, padding=1, groups=1024)),
    "depthwise 4x4": (64, conv(4, 512, 512, 3, padding=1, groups=512)),
    "depthwise 5x5": (8, conv(14, 480, 480, 5, padding=2, groups=480)),
    "dilation 2": (64, conv(16, 32, 32, 3, 1, 2, dilation=2)),
    "3 groups": (32, conv(16, 48, 96, 3, padding=1, groups=3)),
}
PRODUCTS = {  # name: (samples or positions, inputs, outputs)
    "vit_tiny qkv": (3152, 192, 576),
    "vit_tiny projection": (3152, 192, 192),
    "vit_tiny fc1": (3152, 192, 768),
    "vit_tiny fc2": (3152, 768, 192),
    "vit_tiny head": (16, 192, 1000),
    "gpt qkv": (2048, 384, 1152),
    "gpt projection": (2048, 384, 384),
    "gpt fc1": (2048, 384, 1536),
    "gpt fc2": (2048, 1536, 384),
    "gpt head": (2048, 384, 256),
    "gpt 8192 tokens": (512, 384, 8192),
    "vit_b16 qkv": (394, 768, 2304),
    "vit_b16 fc1": (394, 768, 3072),
    "vit_b16 fc2": (394, 3072, 768),
    "mlp 784-512": (64, 784, 512),
    "mlp 512-512": (64, 512, 512),
    "mlp 1024-1024": (64, 1024, 1024),
    "mlp 512-10": (64, 512, 10),
    "vgg16 512-4096": (32, 512, 4096),
    "vgg16 4096-4096": (32, 4096, 4096),
}


MASKS: dict[str, Callable[[int], np.ndarray]] = {
    "all": lambda length: positions_seen(length, length, False, None),
    "padded": lambda length: first_positions(np, np.array([length // 2]), length, True),
    "documents": lambda length: documents(np.arange(length)[None] // (length // 4) + 1),
    "causal": lambda length: positions_seen(length, length, True, None),
    "window": lambda length: positions_seen(length, length, True, length // 8),
}
"""Keys that queries see, by length: all, half, those of four documents, earlier ones, a window."""

ATTENTIONS = {  # name: (batch, positions, heads, elements of a head, mask)
    "vit_tiny": (16, 197, 3, 64, None),
    "vit_tiny cifar10": (64, 65, 3, 64, None),
    "vit_b16": (2, 197, 12, 64, None),
    "1024 positions": (2, 1024, 4, 64, None),
    **{f"{mask} of {t}": (2048 // t, t, 8, 64, mask) for t in (256, 512, 1024) for mask in MASKS},
}


def random(*shape: int, dtype: str) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def convolutions(backend: Backend, dtype: str, only: str) -> Iterator[Case]:
    """Every geometry in its three directions."""
    for name, (batch, g) in CONVOLUTIONS.items():
        if only in name:
            yield from convolution(backend, name, batch, g, dtype)


def convolution(
    backend: Backend, name: str, batch: int, g: ConvGeometry, dtype: str
) -> Iterator[Case]:
    """The three directions of a geometry; of depthwise ones also both gradients in one pass."""
    from pydtnn.kernels.cpu.conv import candidates  # compiled: not there on every GPU machine

    kernels, flops = backend.conv, g.flops(batch)
    x, w = random(batch, *g.size, g.channels, dtype=dtype), random(*g.weight_shape, dtype=dtype)
    dy = random(batch, *g.output, g.filters, dtype=dtype)
    y, dx, dw = np.empty_like(dy), np.empty_like(x), np.empty_like(w)
    algorithms = candidates(g)
    ours: dict[str, dict[str, Call]] = {
        "forward": {
            a: lambda a=a: kernels.forward(x, w, None, g, out=y, algorithm=a) for a in algorithms
        },
        "data": {
            a: lambda a=a: kernels.backward_data(dy, w, g, out=dx, algorithm=a) for a in algorithms
        },
        "filter": {
            a: lambda a=a: kernels.backward_filter(x, dy, g, out=dw, algorithm=a)
            for a in algorithms
        },
    }
    theirs = torch_convolution(x, w, dy, g) if WITH_TORCH else {}
    operands: dict[str, tuple[np.ndarray, ...]]
    operands = {"forward": (x, w, y), "data": (dy, w, dx), "filter": (x, dy, dw)}
    if g.groups == g.channels == g.filters > 1:
        ours["both"] = {"direct": lambda: kernels.backward(x, dy, w, g, dx=dx, dw=dw)}
        operands["both"] = (x, dy, dx, w, dw)
    for direction, calls in ours.items():
        count = 2 * flops if direction == "both" else flops
        yield Case(name, direction, count, calls, theirs.get(direction), operands[direction])


def torch_convolution(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, g: ConvGeometry
) -> dict[str, Call]:
    """The same of PyTorch, on the same memory: its `channels_last` is our order."""
    inputs, weights, gradient = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (x, w, dy))
    padding = [before for before, _ in g.padding]

    def backward(*mask: bool) -> object:
        return torch.ops.aten.convolution_backward(
            gradient, inputs, weights, None, g.stride, padding, g.dilation, False, [0, 0],
            g.groups, [*mask, False],
        )  # fmt: skip

    return {
        "forward": lambda: torch.conv2d(
            inputs, weights, None, g.stride, padding, g.dilation, g.groups
        ),
        "data": lambda: backward(True, False),
        "filter": lambda: backward(False, True),
        "both": lambda: backward(True, True),
    }


def products(backend: Backend, dtype: str, only: str) -> Iterator[Case]:
    """The three products of each fully connected layer."""
    for name, (n, i, o) in PRODUCTS.items():
        if only in name:
            yield from product(backend, name, n, i, o, dtype)


def product(backend: Backend, name: str, n: int, i: int, o: int, dtype: str) -> Iterator[Case]:
    """The three products of one layer."""
    kernels = backend.linear
    x, w, dy = random(n, i, dtype=dtype), random(o, i, dtype=dtype), random(n, o, dtype=dtype)
    y, dx, dw = np.empty_like(dy), np.empty_like(x), np.empty_like(w)
    theirs = torch_product(x, w, dy, y, dx, dw) if WITH_TORCH else {}
    ours: dict[str, Call] = {
        "forward": lambda: kernels.forward(x, w, None, out=y),
        "data": lambda: kernels.backward_data(dy, w, out=dx),
        "filter": lambda: kernels.backward_filter(x, dy, out=dw),
    }
    operands = {"forward": (x, w, y), "data": (dy, w, dx), "filter": (x, dy, dw)}
    for direction, call in ours.items():
        calls, arrays = {"direct": call}, operands[direction]
        yield Case(name, direction, 2 * n * i * o, calls, theirs.get(direction), arrays)


def torch_product(*arrays: np.ndarray) -> dict[str, Call]:
    """The same of PyTorch, on the same memory."""
    x, w, dy, y, dx, dw = map(torch.from_numpy, arrays)
    return {
        "forward": lambda: torch.mm(x, w.T, out=y),
        "data": lambda: torch.mm(dy, w, out=dx),
        "filter": lambda: torch.mm(dy.T, x, out=dw),
    }


def attentions(backend: Backend, dtype: str, only: str) -> Iterator[Case]:
    """Both directions of every attention."""
    for name, sizes in ATTENTIONS.items():
        if only in name:
            yield from attention(backend, name, *sizes, dtype)


def attention(
    backend: Backend,
    name: str,
    n: int,
    length: int,
    heads: int,
    width: int,
    mask: str | None,
    dtype: str,
) -> Iterator[Case]:
    """Both directions; the operations are those of its definition, without a mask."""
    kernels, features = backend.attention, heads * width
    qkv, dy = (random(n, length, k * features, dtype=dtype) for k in (3, 1))
    y, dqkv, log_sums = np.empty_like(dy), np.empty_like(qkv), np.empty((n, heads, length), dtype)
    seen = None if mask is None else np.broadcast_to(MASKS[mask](length), (n, length, 2)).copy()
    kernels.forward(qkv, heads, out=y, log_sums=log_sums, seen=seen)
    theirs = torch_attention(qkv, dy, heads, seen) if WITH_TORCH else {}
    product = 2 * n * heads * length * length * width
    ours: dict[str, Call] = {
        "forward": lambda: kernels.forward(qkv, heads, out=y, log_sums=log_sums, seen=seen),
        "backward": lambda: kernels.backward(dy, qkv, y, log_sums, heads, out=dqkv, seen=seen),
    }
    operands = {"forward": (qkv, y), "backward": (dy, qkv, y, dqkv)}
    for (direction, call), count in zip(ours.items(), (2, 4), strict=True):
        calls, arrays = {"direct": call}, operands[direction]
        yield Case(name, direction, count * product, calls, theirs.get(direction), arrays)


def torch_attention(
    qkv: np.ndarray, dy: np.ndarray, heads: int, seen: np.ndarray | None
) -> dict[str, Call]:
    """The same of PyTorch, on the same memory, but for the gradients of its views of qkv."""
    n, length, features = dy.shape
    parts = torch.from_numpy(qkv).view(n, length, 3, heads, features // heads)
    q, k, v = (part.requires_grad_() for part in parts.permute(2, 0, 3, 1, 4).unbind(0))
    gradient = torch.from_numpy(dy).view(n, length, heads, -1).transpose(1, 2)
    mask = None
    if seen is not None:
        at = np.arange(length)
        mask = torch.from_numpy((seen[:1, :, :1] <= at) & (at < seen[:1, :, 1:]))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask)
    y = attend(q, k, v)

    def forward() -> object:
        with torch.no_grad():
            return attend(q, k, v)

    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(y, (q, k, v), gradient, retain_graph=True),
    }
