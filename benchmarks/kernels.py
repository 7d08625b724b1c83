"""GFLOP/s of the convolutions and matrix products, per geometry and direction.

    python benchmarks/kernels.py                       # all geometries, float32, 1 thread
    python benchmarks/kernels.py --only resnet --threads 2 --dtype float64 --repeats 50

Rates are nominal (taps in the padding count) and the best of the repeats, on warm operands, in
GFLOP/s and as a fraction of the peak of multiply-adds that was measured between them. PyTorch's
(oneDNN's, channels_last) stand beside ours where torch can be imported; the sides take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from peak import Peak

from pydtnn.kernels import Backend, ConvGeometry, create_backend

Calls = tuple[Callable[[], object], ...]
DIRECTIONS = ("forward", "data", "filter")


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
    "resnet18 512": (8, conv(7, 512, 512, 3, padding=1)),
    "lenet 5x5": (64, conv(12, 20, 50, 5)),
    "1x1 64": (64, conv(16, 64, 64, 1)),
    "depthwise 3x3": (16, conv(32, 64, 64, 3, padding=1, groups=64)),
    "dilation 2": (64, conv(16, 32, 32, 3, 1, 2, dilation=2)),
    "3 groups": (32, conv(16, 48, 96, 3, padding=1, groups=3)),
}
PRODUCTS = {
    "mlp 784-512": (64, 784, 512),
    "mlp 512-512": (64, 512, 512),
    "mlp 512-10": (64, 512, 10),
}


def random(*shape: int, dtype: str) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def our_convolution(backend: Backend, batch: int, g: ConvGeometry, dtype: str) -> Calls:
    """The three directions of ours."""
    x, w = random(batch, *g.size, g.channels, dtype=dtype), random(*g.weight_shape, dtype=dtype)
    dy = random(batch, *g.output, g.filters, dtype=dtype)
    y, dx, dw = np.empty_like(dy), np.empty_like(x), np.empty_like(w)
    return (
        lambda: backend.conv.forward(x, w, None, g, out=y),
        lambda: backend.conv.backward_data(dy, w, g, out=dx),
        lambda: backend.conv.backward_filter(x, dy, g, out=dw),
    )


def torch_convolution(batch: int, g: ConvGeometry, dtype: str) -> Calls:
    """The three directions of PyTorch."""
    import torch

    def tensor(*shape: int) -> torch.Tensor:
        value = torch.from_numpy(random(*shape, dtype=dtype))
        return value.to(memory_format=torch.channels_last)

    padding = [before for before, _ in g.padding]
    x, dy = tensor(batch, g.channels, *g.size), tensor(batch, g.filters, *g.output)
    w = tensor(g.filters, g.channels // g.groups, *g.kernel)

    def backward(*mask: bool) -> object:
        return torch.ops.aten.convolution_backward(
            dy, x, w, None, g.stride, padding, g.dilation, False, [0, 0], g.groups, [*mask, False]
        )

    return (
        lambda: torch.conv2d(x, w, None, g.stride, padding, g.dilation, g.groups),
        lambda: backward(True, False),
        lambda: backward(False, True),
    )


def our_product(backend: Backend, sizes: tuple[int, int, int], dtype: str) -> Calls:
    """The three directions of a fully connected layer of ours."""
    n, i, o = sizes
    x, w, dy = random(n, i, dtype=dtype), random(o, i, dtype=dtype), random(n, o, dtype=dtype)
    y, dx, dw = np.empty_like(dy), np.empty_like(x), np.empty_like(w)
    return (
        lambda: backend.linear.forward(x, w, None, out=y),
        lambda: backend.linear.backward_data(dy, w, out=dx),
        lambda: backend.linear.backward_filter(x, dy, out=dw),
    )


def torch_product(sizes: tuple[int, int, int], dtype: str) -> Calls:
    """The same of PyTorch."""
    import torch

    n, i, o = sizes
    x, w, dy = (torch.from_numpy(random(*s, dtype=dtype)) for s in ((n, i), (o, i), (n, o)))
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
    return (
        lambda: torch.mm(x, w.T, out=y),
        lambda: torch.mm(dy, w, out=dx),
        lambda: torch.mm(dy.T, x, out=dw),
    )


def best_times(calls: Calls, repeats: int) -> list[float]:
    """Shortest time of each call, in s; all of them take turns."""
    times = [float("inf")] * len(calls)
    for _ in range(repeats):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            call()
            times[number] = min(times[number], time.perf_counter() - start)
    return times


def cases(
    backend: Backend, dtype: str, only: str, with_torch: bool
) -> Iterator[tuple[str, float, Calls, Calls]]:
    """Name, flops of a direction, our calls and PyTorch's."""
    for name, (batch, g) in CONVOLUTIONS.items():
        if only in name:
            theirs = torch_convolution(batch, g, dtype) if with_torch else ()
            yield name, g.flops(batch), our_convolution(backend, batch, g, dtype), theirs
    for name, (n, i, o) in PRODUCTS.items():
        if only in name:
            theirs = torch_product((n, i, o), dtype) if with_torch else ()
            yield name, 2 * n * i * o, our_product(backend, (n, i, o), dtype), theirs


def processor() -> str:
    """Name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((s.split(": ")[1] for s in lines if "model name" in s), platform.processor())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="geometries whose names contain this")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    backend = create_backend("cpu", threads=options.threads)
    with_torch = importlib.util.find_spec("torch") is not None
    if with_torch:
        import torch

        torch.set_num_threads(options.threads)
    meter = Peak(backend.isa, options.dtype)
    print("python", *sys.argv, f"({processor()}, {os.cpu_count()} cores, {backend.isa})")
    peers = "".join(f"{f'torch {name}':>18}" for name in DIRECTIONS) if with_torch else ""
    print(f"{'GFLOP/s (of peak)':24}{'peak':>6}", *(f"{name:>13}" for name in DIRECTIONS), peers)
    for name, flops, ours, theirs in cases(backend, options.dtype, options.only, with_torch):
        rates = [flops / t for t in best_times((*ours, *theirs), options.repeats)]
        peak = max(meter.measure() for _ in range(5)) * options.threads
        row = [f"{rate / 1e9:6.1f} ({rate / peak:4.2f})" for rate in rates[:3]]
        row += [
            f"{t / 1e9:9.1f} ({o / t:5.2f}x)" for o, t in zip(rates[:3], rates[3:], strict=False)
        ]
        print(f"{name:24}{peak / 1e9:6.0f}", *row, flush=True)


if __name__ == "__main__":
    main()
