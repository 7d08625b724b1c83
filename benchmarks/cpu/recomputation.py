"""Steps in which values are recomputed in backward, compared with steps that keep them.

    python -m benchmarks.cpu.recomputation                        # ResNet-44, batch 128
    python -m benchmarks.cpu.recomputation --models vgg16_bn --recompute 2 4 auto

Steps alternate: one that keeps everything, and one for each entry of `--recompute`: a number of
parts, the name of a layer, or auto; an entry such as 0.4 is auto with this share of the memory as
its limit. `arrays` is the peak of the memory pool in a step, and `again` the share of forward's
operations that run again. The targets for ResNet-44 are arrays of at most 0.45 and a step of at
most 1.35 times those without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import Report
from benchmarks.common.work import WORK, Ours
from pydtnn.model.memory import forecast_memory

WARM_UP = 3  # steps; the first one chooses algorithms
SLOTS = 1  # of SGD with momentum


def create(name: str, threads: int, recompute: str) -> Ours:
    """Create one side; everything is kept if `recompute` is empty."""
    options: dict[str, Any] = {}
    batch = WORK[name].batch
    ours = Ours(name, threads)
    if recompute.isdecimal():
        options["recompute"] = int(recompute)
    elif recompute.startswith("0."):
        whole = forecast_memory(ours.model, batch, slots=SLOTS).resident
        options |= {"recompute": "auto", "memory_limit": round(float(recompute) * whole)}
    elif recompute:
        options["recompute"] = recompute
    if options:
        ours = Ours(name, threads, **options)
        ours.model.choose_segments(batch, slots=SLOTS)
    return ours


def seconds(ours: Ours) -> float:
    """Time one step."""
    start = time.perf_counter()
    ours.step()
    return time.perf_counter() - start


def measure(report: Report, name: str, threads: int, steps: int, ways: Sequence[str]) -> None:
    """Print the rows of one model."""
    sides = [create(name, threads, way) for way in ("", *ways)]
    times: list[list[float]] = [[] for _ in sides]
    peaks = [0] * len(sides)
    for turn in range(WARM_UP + steps):
        for i, ours in enumerate(sides):
            ours.model.backend.memory.reset_peak()
            elapsed = seconds(ours)
            peaks[i] = ours.model.backend.memory.peak
            if turn >= WARM_UP:
                times[i].append(elapsed)
    medians = [statistics.median(own) for own in times]
    for way, ours, peak, median in zip(("nothing", *ways), sides, peaks, medians, strict=True):
        model = ours.model
        flops = {node.index: node.layer.cost(1).flops_forward for node in model.graph.nodes}
        again = sum(flops[node.index] for part in model.segments.parts for node in part.nodes)
        report.line(
            f"{name:16}{way:12}{len(model.segments.parts):6}{again / sum(flops.values()):8.2f}"
            f"{peak / 2**20:10.1f}{peak / peaks[0]:8.3f}{1e3 * median:10.2f}"
            f"{median / medians[0]:8.3f}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=WORK, default=["resnet44-128"])
    parser.add_argument("--recompute", nargs="+", default=["auto", "0.45", "4", "8"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    report = Report(args.output)
    report.line(
        f"{'model':16}{'recompute':12}{'parts':>6}{'again':>8}{'arrays MiB':>10}{'ratio':>8}"
        f"{'step ms':>10}{'ratio':>8}"
    )
    for name in args.models:
        measure(report, name, args.threads, args.steps, args.recompute)


if __name__ == "__main__":
    main()
