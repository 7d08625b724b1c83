"""Convolutions and products that are measured on a GPU: our calls, and PyTorch's on equal terms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.compute_bound import conv
from benchmarks.common.report import WITH_TORCH
from benchmarks.gpu.timing import Call
from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.dtypes import arithmetic

LARGE = 8192
CONVOLUTIONS = {  # name: (batch, geometry)
    "resnet44 16": (128, conv(32, 16, 16, 3, padding=1)),
    "resnet44 32": (128, conv(16, 32, 32, 3, padding=1)),
    "resnet44 64": (128, conv(8, 64, 64, 3, padding=1)),
    "resnet44 16-32 /2": (128, conv(32, 16, 32, 3, 2, 1)),
    "vgg16 64": (128, conv(32, 64, 64, 3, padding=1)),
    "vgg16 256": (128, conv(8, 256, 256, 3, padding=1)),
    "resnet50 first 7x7 /2": (128, conv(224, 3, 64, 7, 2, 3)),
    "resnet50 1x1 64-256": (128, conv(56, 64, 256, 1)),
    "resnet50 3x3 64": (128, conv(56, 64, 64, 3, padding=1)),
    "resnet50 3x3 128 /2": (128, conv(56, 128, 128, 3, 2, 1)),
    "resnet50 3x3 256": (128, conv(14, 256, 256, 3, padding=1)),
    "resnet50 1x1 1024-256": (128, conv(14, 1024, 256, 1)),
    "resnet50 3x3 512": (128, conv(7, 512, 512, 3, padding=1)),
    "depthwise 3x3": (128, conv(32, 64, 64, 3, padding=1, groups=64)),
}
PRODUCTS = {  # name: (batch, inputs, outputs)
    "mlp 784-512": (512, 784, 512),
    "resnet50 head": (128, 2048, 1000),
    "square": (LARGE, LARGE, LARGE),
}


class Case(NamedTuple):
    """One operation: its work in flop, ours, and PyTorch's where it is there."""

    name: str
    direction: str
    flops: int
    ours: Call
    theirs: Call | None


def random(backend: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Normal numbers on the device."""
    values = np.random.default_rng(0).standard_normal(shape, "float32")
    return backend.asarray(values.astype(dtype))


def tensor(array: Any) -> Any:
    """See an array as a tensor of PyTorch, on the same memory; NHWC as `channels_last`."""
    import torch

    if array.dtype == "bfloat16":  # which DLPack of NumPy does not know
        seen = torch.from_dlpack(array.view("uint16")).view(torch.bfloat16)
    else:
        seen = torch.from_dlpack(array)
    return seen.permute(0, 3, 1, 2) if seen.ndim == 4 else seen


def convolutions(backend: Any, dtype: str, only: str) -> Iterator[Case]:
    """Every geometry in its three directions."""
    for name, (batch, g) in CONVOLUTIONS.items():
        if only in name:
            yield from convolution(backend, name, batch, g, dtype)


def convolution(backend: Any, name: str, batch: int, g: ConvGeometry, dtype: str) -> Iterator[Case]:
    """The three directions of a geometry; ours has float32 gradients of 16-bit filters."""
    kernels, flops = backend.conv, g.flops(batch)
    x = random(backend, (batch, *g.size, g.channels), dtype)
    w = random(backend, g.weight_shape, dtype)
    dy = random(backend, (batch, *g.output, g.filters), dtype)
    y, dx = backend.empty(dy.shape, dtype), backend.empty(x.shape, dtype)
    dw = backend.empty(w.shape, arithmetic(dtype))
    theirs: dict[str, Call] = {}
    if WITH_TORCH:
        import torch

        ops = torch.ops.aten
        inputs, weights, gradient = map(tensor, (x, w, dy))
        shape = (g.stride, [before for before, _ in g.padding], g.dilation)

        def backward(*mask: bool) -> object:
            return ops.convolution_backward(
                gradient, inputs, weights, None, *shape, False, [0, 0], g.groups, [*mask, False]
            )

        theirs = {
            "forward": lambda: torch.conv2d(inputs, weights, None, *shape, g.groups),
            "data": lambda: backward(True, False),
            "filter": lambda: backward(False, True),
        }
    ours: dict[str, Call] = {
        "forward": lambda: kernels.forward(x, w, None, g, out=y),
        "data": lambda: kernels.backward_data(dy, w, g, out=dx),
        "filter": lambda: kernels.backward_filter(x, dy, g, out=dw),
    }
    for direction, call in ours.items():
        yield Case(name, direction, flops, call, theirs.get(direction))


def products(backend: Any, dtype: str, only: str) -> Iterator[Case]:
    """The three products of each fully connected layer."""
    for name, size in PRODUCTS.items():
        if only in name:
            yield from product(backend, name, size, dtype)


def product(backend: Any, name: str, size: tuple[int, int, int], dtype: str) -> Iterator[Case]:
    """The three products of a layer."""
    (n, i, o), kernels = size, backend.linear
    x, w, dy = (random(backend, shape, dtype) for shape in ((n, i), (o, i), (n, o)))
    y, dx = backend.empty(dy.shape, dtype), backend.empty(x.shape, dtype)
    dw = backend.empty(w.shape, arithmetic(dtype))
    theirs: dict[str, Call] = {}
    if WITH_TORCH:
        import torch

        inputs, weights, gradient = map(tensor, (x, w, dy))
        outputs = [torch.empty_like(t) for t in (gradient, inputs, weights)]
        theirs = {
            "forward": lambda: torch.mm(inputs, weights.T, out=outputs[0]),
            "data": lambda: torch.mm(gradient, weights, out=outputs[1]),
            "filter": lambda: torch.mm(gradient.T, inputs, out=outputs[2]),
        }
    ours: dict[str, Call] = {
        "forward": lambda: kernels.forward(x, w, None, out=y),
        "data": lambda: kernels.backward_data(dy, w, out=dx),
        "filter": lambda: kernels.backward_filter(x, dy, out=dw),
    }
    for direction, call in ours.items():
        yield Case(name, direction, 2 * n * i * o, call, theirs.get(direction))


COMPUTE = {"conv": convolutions, "linear": products}
