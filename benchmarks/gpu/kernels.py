"""Rates of kernels on a GPU: GB/s of those that move data, TFLOP/s of convolutions and products.

    python -m benchmarks.gpu.kernels                    # everything, float32 with TF32 and bfloat16
    python -m benchmarks.gpu.kernels --families norm fused update --sizes cold --json rates.json

Kernels that move data, as fractions of a copy on the device that is measured alternately with them.
Two sizes: the first activations of ResNet-44 at batch 64 (which stay in the L2 cache), and tensors
of 256 MB. Bytes are those that a kernel has to read and write, each once. Medians; a star marks
less than 0.85.

Convolutions (forward, backward of the data, backward of the filters) and products, ours beside
cuDNN's and cuBLAS's through PyTorch (channels_last, cudnn.benchmark), alternately, as TFLOP/s and
as fractions of the rate of a product of 8192 x 8192 matrices. "x" is ours over theirs.

All calls are captured in CUDA graphs, so that launching them costs nothing (`timing.py`); "!"
marks what could not be captured. What fails is told and does not keep others from being measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.memory_bound import FAMILIES, SHAPES, Arrays
from benchmarks.common.report import WITH_TORCH, Report
from benchmarks.gpu.compute import COMPUTE, LARGE, Case, random
from benchmarks.gpu.timing import Replay, ours, theirs
from benchmarks.gpu.work import create_backend, settle_torch

MIN_SHARE_OF_PEAK = 0.85
MB256 = 2**28
SMALL = 512  # rows of matrices that are large enough to try the script out on a CPU
DTYPES = ("float32", "bfloat16", "float16", "float64")


class Kernels:
    """Measures kernels until there are no more, or no time.

    Parameters
    ----------
    backend : Backend
    report : Report
    runs : int
        Times that each is measured.
    deadline : float
        By `time.monotonic`.
    json : Path, optional
        File of the numbers, written anew after each table.
    """

    def __init__(
        self, backend: Any, report: Report, runs: int, deadline: float, json: Path | None
    ) -> None:
        self.backend, self.report, self.runs = backend, report, runs
        self.deadline, self.json = deadline, json
        self.numbers: dict[str, dict[str, Any]] = {"memory": {}, "compute": {}}
        self.write()

    def late(self) -> bool:
        """Whether the time is over; the report says so."""
        if time.monotonic() < self.deadline:
            return False
        self.report.line("no time was left for what follows")
        self.write()
        return True

    def move(self, families: list[str], size: str, dtype: str) -> bool:
        """Measure the kernels that move data; return whether there was time for all."""
        numbers = self.numbers["memory"].setdefault(dtype, {"failed": {}, "complete": False})
        fractions = numbers[size] = {}
        a = Arrays(shape_of(size, dtype), dtype, self.backend.xp)
        repeat = max(2, min(20, MB256 // a.size))
        copy = ours(self.backend, lambda: self.backend.xp.copyto(a.out, a.x), repeat)
        line = self.report.line
        line(f"\n{size}, {dtype}: tensors of {a.size / 2**20:.0f} MB {a.shape}, median of runs")
        line(f"{'kernel':34} {'us':>9} {'GB/s':>7} {'copy':>7} {'ratio':>6}")
        for family in families:
            try:
                cases = list(FAMILIES[family](self.backend, a))
            except Exception as error:  # of whatever kind: the other families are of interest
                numbers["failed"][family] = problem(error)
                line(f"{family}: {problem(error)}")
                continue
            for name, moved, call in cases:
                if self.late():
                    return False
                full = f"{family} {name}"
                try:
                    replay = ours(self.backend, call, repeat)
                    pairs = [(replay.seconds(), copy.seconds()) for _ in range(self.runs)]
                except Exception as error:
                    numbers["failed"][full] = problem(error)
                    line(f"{full:34} failed: {problem(error)}")
                    continue
                time_, copied = (statistics.median(column) for column in zip(*pairs, strict=True))
                rate, peak = moved / time_ / 1e9, 2 * a.size / copied / 1e9
                fractions[full] = rate / peak
                line(
                    f"{full:34} {1e6 * time_:9.1f} {rate:7.0f} {peak:7.0f} {rate / peak:6.2f}"
                    + " *" * (rate < MIN_SHARE_OF_PEAK * peak)
                    + mark(replay)
                )
                self.write()
        numbers["complete"] = True
        self.write()
        return True

    def compute(self, cases: Iterator[Case], peak: float, dtype: str, repeat: int) -> bool:
        """Measure convolutions or products; return whether there was time for all."""
        numbers = self.numbers["compute"].setdefault(dtype, {})
        line = self.report.line
        line(f"\n{f'{dtype}: TFLOP/s (of the matrix rate)':42}{'ours':>15}{'PyTorch':>15}")
        for case in cases:
            if self.late():
                return False
            name = f"{case.name:31} {case.direction:10}"
            try:
                replays = [ours(self.backend, case.ours, repeat)]
                if case.theirs:
                    replays.append(theirs(self.backend, case.theirs, repeat))
                rounds = [[replay.seconds() for replay in replays] for _ in range(self.runs)]
            except Exception as error:
                line(f"{name}failed: {problem(error)}")
                continue
            rates = [case.flops / statistics.median(column) for column in zip(*rounds, strict=True)]
            numbers[" ".join(name.split())] = rates
            cells = "".join(f"{rate / 1e12:8.2f} ({rate / peak:4.2f})" for rate in rates)
            ratio = f"{rates[0] / rates[1]:7.2f}x" if case.theirs else ""
            line(f"{name}{cells}{ratio}{mark(replays[0])}")
        self.write()
        return True

    def matrix_rate(self, dtype: str) -> float:
        """Flop/s of a product of large matrices: what other rates are fractions of."""
        size = LARGE if self.backend.name == "cuda" else SMALL
        a, b, c = (random(self.backend, (size, size), dtype) for _ in range(3))
        replay = ours(self.backend, lambda: self.backend.linear.forward(a, b, None, out=c), 3)
        peak = 2 * size**3 / statistics.median(replay.seconds() for _ in range(self.runs))
        self.report.line(f"\n{dtype}: product of {size} x {size}: {peak / 1e12:.0f} TFLOP/s")
        return peak

    def write(self) -> None:
        """Write the numbers so far."""
        if self.json:
            self.json.write_text(json.dumps(self.numbers, indent=1) + "\n")


def shape_of(size: str, dtype: str) -> tuple[int, ...]:
    """Return the shape of the tensors: the large ones have 256 MB in every type."""
    shape = SHAPES[size]
    if size != "cold":
        return shape
    return (MB256 // (prod(shape[1:]) * np.dtype(dtype).itemsize), *shape[1:])


def problem(error: Exception) -> str:
    """Tell an error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def mark(replay: Replay) -> str:
    """Return a sign where launching was timed as well."""
    return "" if replay.captured else " !"


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    everything = [*FAMILIES, *COMPUTE]
    parser.add_argument("--families", nargs="+", choices=everything, default=everything)
    parser.add_argument("--only", default="", help="geometries whose names contain this")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--repeat", type=int, default=10, help="calls in a graph")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try it")
    budget = float(os.environ.get("GPU_CHECK_SECONDS", "inf"))
    parser.add_argument("--seconds", type=float, default=budget - 5, help="s for everything")
    parser.add_argument("--output", type=Path, help="file that receives the tables, too")
    parser.add_argument("--json", type=Path, help="file that receives the numbers")
    return parser


def main() -> int:
    """Print the tables; the exit status is 0 if there was time for all."""
    args = arguments().parse_args()
    deadline = time.monotonic() + args.seconds
    if WITH_TORCH:
        settle_torch()
    backend = create_backend(args.device)
    report = Report(args.output)
    report.line(f"{backend.isa}, {', '.join(getattr(backend, 'versions', ()))}")
    kernels = Kernels(backend, report, args.runs, deadline, args.json)
    moving = [family for family in args.families if family in FAMILIES]
    complete = True
    for size in args.sizes if moving else ():
        for dtype in args.dtypes:
            complete = complete and kernels.move(moving, size, dtype)
            backend.trim()
    computing = [family for family in args.families if family in COMPUTE]
    for dtype in args.dtypes if computing else ():
        peak = kernels.matrix_rate(dtype) if complete else 0.0
        for family in computing:
            cases = COMPUTE[family](backend, dtype, args.only)
            complete = complete and kernels.compute(cases, peak, dtype, args.repeat)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
