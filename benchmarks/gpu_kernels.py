"""Rates of kernels on a GPU: TFLOP/s of convolutions and products, GB/s of those that move data.

    python benchmarks/gpu_kernels.py                            # everything, float32 with TF32
    python benchmarks/gpu_kernels.py --families norm fused update --dtype bfloat16 --json rates.json

Kernels that move data, as fractions of a copy on the device that is measured in turns with them.
Two sizes: the first activations of ResNet-44 at batch 64 (4 MB in float32, which stay in the L2
cache), and tensors of 256 MB. Bytes are those that a kernel has to read and write, each once.
Medians; a star marks less than 0.85.

Convolutions (forward, backward of the data, backward of the filters) and products, ours beside
cuDNN's and cuBLAS's through PyTorch (channels_last, cudnn.benchmark), in turns, as TFLOP/s and as
fractions of the rate of a product of 8192 x 8192 matrices. "x" is ours over theirs.

All calls are captured in CUDA graphs, so that launching them costs nothing (`gpu_timing.py`); "!"
marks what could not be captured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from compute_bound import conv
from gpu_timing import Call, OursReplay, TheirsReplay
from memory_bound import FAMILIES, SHAPES, Arrays
from report import WITH_TORCH, Report

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.cuda import create_cuda_backend

ENOUGH = 0.85
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


def random(xp: Any, *shape: int, dtype: str) -> Any:
    """Normal numbers on the device."""
    return xp.asarray(np.random.default_rng(0).standard_normal(shape, "float32")).astype(dtype)


def tensor(array: Any) -> Any:
    """See an array as a tensor of PyTorch, on the same memory; NHWC as `channels_last`."""
    import torch

    seen = torch.from_dlpack(array)
    return seen.permute(0, 3, 1, 2) if seen.ndim == 4 else seen


def convolutions(backend: Any, dtype: str, only: str) -> Iterator[Case]:
    """Every geometry in its three directions."""
    for name, (batch, g) in CONVOLUTIONS.items():
        if only in name:
            yield from convolution(backend, name, batch, g, dtype)


def convolution(backend: Any, name: str, batch: int, g: ConvGeometry, dtype: str) -> Iterator[Case]:
    """The three directions of a geometry."""
    xp, kernels, flops = backend.xp, backend.conv, g.flops(batch)
    x, w = (random(xp, *s, dtype=dtype) for s in ((batch, *g.size, g.channels), g.weight_shape))
    dy = random(xp, batch, *g.output, g.filters, dtype=dtype)
    y, dx, dw = xp.empty_like(dy), xp.empty_like(x), xp.empty_like(w)
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
    xp, kernels = backend.xp, backend.linear
    for name, (n, i, o) in PRODUCTS.items():
        if only not in name:
            continue
        x, w, dy = (random(xp, *s, dtype=dtype) for s in ((n, i), (o, i), (n, o)))
        y, dx, dw = xp.empty_like(dy), xp.empty_like(x), xp.empty_like(w)
        theirs: dict[str, Call] = {}
        if WITH_TORCH:
            import torch

            tx, tw, tdy, ty, tdx, tdw = map(tensor, (x, w, dy, y, dx, dw))
            theirs = {
                "forward": lambda a=tx, b=tw, c=ty: torch.mm(a, b.T, out=c),
                "data": lambda a=tdy, b=tw, c=tdx: torch.mm(a, b, out=c),
                "filter": lambda a=tdy, b=tx, c=tdw: torch.mm(a.T, b, out=c),
            }
        ours: dict[str, Call] = {
            "forward": lambda a=x, b=w, c=y: kernels.forward(a, b, None, out=c),
            "data": lambda a=dy, b=w, c=dx: kernels.backward_data(a, b, out=c),
            "filter": lambda a=x, b=dy, c=dw: kernels.backward_filter(a, b, out=c),
        }
        for direction, call in ours.items():
            yield Case(name, direction, 2 * n * i * o, call, theirs.get(direction))


COMPUTE = {"conv": convolutions, "linear": products}


def matrix_rate(backend: Any, dtype: str, runs: int) -> float:
    """Flop/s of a product of large matrices: what other rates are fractions of."""
    a, b, c = (random(backend.xp, LARGE, LARGE, dtype=dtype) for _ in range(3))
    replay = OursReplay(backend, lambda: backend.linear.forward(a, b, None, out=c), 3)
    return 2 * LARGE**3 / statistics.median(replay.seconds() for _ in range(runs))


def compute_table(
    report: Report, backend: Any, cases: Iterator[Case], peak: float, repeat: int, runs: int
) -> None:
    """TFLOP/s of every case."""
    report.line(f"\n{'TFLOP/s (of the matrix rate)':31}{'':9}{'ours':>15}{'PyTorch':>15}")
    for case in cases:
        replays: list[OursReplay | TheirsReplay] = [OursReplay(backend, case.ours, repeat)]
        if case.theirs:
            replays.append(TheirsReplay(case.theirs, repeat))
        rounds = [[replay.seconds() for replay in replays] for _ in range(runs)]
        rates = [case.flops / statistics.median(column) for column in zip(*rounds, strict=True)]
        cells = "".join(f"{rate / 1e12:8.2f} ({rate / peak:4.2f})" for rate in rates)
        ratio = f"{rates[0] / rates[1]:7.2f}x" if case.theirs else ""
        report.line(f"{case.name:31}{case.direction:9}{cells}{ratio}{mark(replays[0])}")


def mark(replay: Any) -> str:
    """A sign where launching was timed as well."""
    return "" if replay.captured else " !"


def memory_table(
    report: Report, backend: Any, families: list[str], size: str, dtype: str, runs: int
) -> dict[str, float]:
    """GB/s of the kernels that move data, on tensors of one size; returns their fractions."""
    fractions: dict[str, float] = {}
    a = Arrays(SHAPES[size], dtype, backend.xp)
    repeat = max(2, min(20, 2**28 // a.size))
    copy = OursReplay(backend, lambda: backend.xp.copyto(a.out, a.x), repeat)
    report.line(f"\n{size}: tensors of {a.size / 2**20:.0f} MB {a.shape}, median of {runs}")
    report.line(f"{'kernel':34} {'us':>9} {'GB/s':>7} {'copy':>7} {'ratio':>6}")
    for family in families:
        for name, moved, call in FAMILIES[family](backend, a):
            replay = OursReplay(backend, call, repeat)
            pairs = [(replay.seconds(), copy.seconds()) for _ in range(runs)]
            time_, copied = (statistics.median(column) for column in zip(*pairs, strict=True))
            rate, peak = moved / time_ / 1e9, 2 * a.size / copied / 1e9
            fractions[f"{family} {name}"] = rate / peak
            report.line(
                f"{family + ' ' + name:34} {1e6 * time_:9.1f} {rate:7.0f} {peak:7.0f} "
                f"{rate / peak:6.2f}" + " *" * (rate < ENOUGH * peak) + mark(replay)
            )
    return fractions


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    everything = [*COMPUTE, *FAMILIES]
    parser.add_argument("--families", nargs="+", choices=everything, default=everything)
    parser.add_argument("--only", default="", help="geometries whose names contain this")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--repeat", type=int, default=10, help="calls in a graph")
    parser.add_argument("--output", type=Path, help="file that receives the tables, too")
    parser.add_argument("--json", type=Path, help="file that receives the fractions as numbers")
    args = parser.parse_args()
    if WITH_TORCH:
        import torch

        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    backend = create_cuda_backend(tf32=True)
    report = Report(args.output)
    report.line(f"{backend.isa}, {', '.join(backend.versions)}, {args.dtype}")
    compute = [family for family in args.families if family in COMPUTE]
    if compute:
        peak = matrix_rate(backend, args.dtype, args.runs)
        report.line(f"product of {LARGE} x {LARGE} matrices: {peak / 1e12:.0f} TFLOP/s")
    for family in compute:
        cases = COMPUTE[family](backend, args.dtype, args.only)
        compute_table(report, backend, cases, peak, args.repeat, args.runs)
    fractions: dict[str, dict[str, float]] = {}
    memory = [family for family in args.families if family in FAMILIES]
    for size in args.sizes if memory else ():
        fractions[size] = memory_table(report, backend, memory, size, args.dtype, args.runs)
        if args.json:
            args.json.write_text(json.dumps(fractions, indent=1) + "\n")


if __name__ == "__main__":
    main()
