"""Rates of the kernels: GFLOP/s of convolutions and products, GB/s of those that move data.

    python -m benchmarks.cpu.kernels                  # everything, float32, 1 thread: some minutes
    python -m benchmarks.cpu.kernels --families conv --only resnet44 --threads 2 --isa avx2
    python -m benchmarks.cpu.kernels --families norm fused --dtype float64 --repeats 50

Convolutions (forward, backward of the data, backward of the filters), products and attention, ours
with every algorithm that suits beside oneDNN's through PyTorch, on the same memory in
`channels_last`, alternately. GFLOP/s are nominal (two for each tap, channel, filter and position,
padding included), so that Winograd's algorithms can exceed 1.00 of the peak of multiply-adds that
is measured between the geometries. Best of the repeats; "warm" right after one another, "cold" with
all operands flushed from the caches before each call. "roof" is the peak, or less where moving the
operands at the rate of a copy takes longer, and a star marks less than 0.85 of it by the best of
ours; "x" is the best of ours over theirs.

Kernels that move data, as fractions of a copy by as many threads, measured alternately with it.
Two sizes: the first activations of ResNet-44 at batch 64 (4 MB each, used again and again: warm),
and tensors of 256 MB (cold). Bytes are those that a kernel has to read and write, each once. More
than 1 is possible, since writing a line that is not in cache also reads it: kernels that mostly
read beat a copy, those that mostly write fall behind it. Medians; a star marks less than 0.85.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.common.compute_bound import Case, attentions, convolutions, products
from benchmarks.common.memory_bound import FAMILIES, SHAPES, Arrays
from benchmarks.common.report import WITH_TORCH, Report
from benchmarks.cpu.bandwidth import copier, seconds
from benchmarks.cpu.flush import Flush
from benchmarks.cpu.peak import Peak
from pydtnn.kernels import Backend, create_backend

COMPUTE = {"attention": attentions, "conv": convolutions, "linear": products}
ALGORITHMS = ("direct", "winograd4", "winograd2")
COPY = "copy"
MIN_SHARE_OF_PEAK = 0.85


def best_times(case: Case, repeats: int, flush: Flush | None) -> dict[str, float]:
    """Shortest time of each way to compute a case, in s; they alternate."""
    largest = max(case.operands, key=lambda array: array.nbytes)
    spare = np.empty_like(largest)
    calls = case.ours | {COPY: lambda: np.copyto(spare, largest)}
    if case.theirs:
        calls["oneDNN"] = case.theirs
    times = dict.fromkeys(calls, float("inf"))
    result: object = None
    for _ in range(repeats):
        for name, call in calls.items():
            if flush:
                flush(*case.operands, spare, *allocated(result))
                result = None
            start = time.perf_counter()
            result = call()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def allocated(result: object) -> list[np.ndarray]:
    """What PyTorch has made for its result: it will be the memory of the next one."""
    tensors = result if isinstance(result, tuple) else (result,)
    return [t.permute(0, 2, 3, 1).numpy() for t in tensors if getattr(t, "ndim", 0) == 4]


def compute_table(
    report: Report, cases: Iterator[Case], meter: Peak, threads: int, repeats: int
) -> None:
    """GFLOP/s of every case, warm and cold."""
    flush = Flush()
    names = [*ALGORITHMS, *["oneDNN"] * WITH_TORCH]
    title = f"{'GFLOP/s (of the peak)':22}{'':9}{'':6}{'peak':>5}{'roof':>5}  "
    report.line("\n" + title + "".join(f"{name:>13}" for name in names))
    for case in cases:
        for state, flusher in (("warm", None), ("cold", flush)):
            times = best_times(case, repeats, flusher)
            peak = max(meter.measure() for _ in range(5)) * threads
            sizes = [array.nbytes for array in case.operands]
            moving = times.pop(COPY) * sum(sizes) / (2 * max(sizes))  # s, at the rate of the copy
            roof = min(peak, case.flops / moving)
            rates = {name: case.flops / seconds for name, seconds in times.items()}
            report.line(
                f"{case.name:22}{case.direction:9}{state:6}{peak / 1e9:5.0f}{roof / 1e9:5.0f}  "
                + "".join(cell(rates.get(name), peak) for name in names)
                + verdict(rates, roof)
            )


def cell(rate: float | None, peak: float) -> str:
    """One rate of the table."""
    return f"{'-':>13}" if rate is None else f"{rate / 1e9:6.0f} ({rate / peak:4.2f})"


def verdict(rates: dict[str, float], roof: float) -> str:
    """How the best of ours compares with theirs and with what the machine can do."""
    theirs = rates.pop("oneDNN", None)
    best = max(rates.values())
    ratio = f"{best / theirs:7.2f}x" if theirs else ""
    return ratio + " *" * (best < MIN_SHARE_OF_PEAK * roof)


def memory_table(
    report: Report, backend: Backend, families: list[str], size: str, dtype: str, runs: int
) -> None:
    """GB/s of the kernels that move data, on tensors of one size."""
    a = Arrays(SHAPES[size], dtype)
    repeat = max(1, 2**25 // a.size)
    copy = copier(backend.threads, a.out, a.x)
    seconds(copy, 1)
    report.line(f"\n{size}: tensors of {a.size / 2**20:.0f} MB {a.shape}, median of {runs}")
    report.line(f"{'kernel':34} {'ms':>8} {'best ms':>8} {'GB/s':>7} {'copy':>7} {'ratio':>6}")
    for family in families:
        for name, moved, call in FAMILIES[family](backend, a):
            with np.errstate(all="ignore"):
                seconds(call, 1)
                pairs = [(seconds(call, repeat), seconds(copy, repeat)) for _ in range(runs)]
            time_, copied = (statistics.median(column) for column in zip(*pairs, strict=True))
            best = min(pair[0] for pair in pairs)
            rate, peak = moved / time_ / 1e9, 2 * a.size / copied / 1e9
            mark = " *" if rate < MIN_SHARE_OF_PEAK * peak else ""
            report.line(
                f"{family + ' ' + name:34} {1e3 * time_:8.3f} {1e3 * best:8.3f} "
                f"{rate:7.1f} {peak:7.1f} {rate / peak:6.2f}{mark}"
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    everything = [*COMPUTE, *FAMILIES]
    parser.add_argument("--families", nargs="+", choices=everything, default=everything)
    parser.add_argument("--only", default="", help="geometries whose names contain this")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", help="of ours; ONEDNN_MAX_CPU_ISA=AVX2 holds theirs")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--repeats", type=int, default=20, help="of each call")
    parser.add_argument("--output", type=Path, help="file that receives the tables, too")
    args = parser.parse_args()
    backend = create_backend("cpu", threads=args.threads, isa=args.isa)
    if WITH_TORCH:
        import torch

        torch.set_num_threads(args.threads)
    report = Report(args.output)
    report.line(f"{backend.isa}, threads {args.threads}, {args.dtype}")
    compute = [family for family in args.families if family in COMPUTE]
    meter = Peak(backend.isa, args.dtype) if compute else None
    for family in compute:
        cases = COMPUTE[family](backend, args.dtype, args.only)
        compute_table(report, cases, meter, args.threads, args.repeats)
    memory = [family for family in args.families if family in FAMILIES]
    for size in args.sizes if memory else ():
        memory_table(report, backend, memory, size, args.dtype, args.repeats)


if __name__ == "__main__":
    main()
