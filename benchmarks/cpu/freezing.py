"""Steps in which only a part of a model is trained, compared with whole ones.

    python -m benchmarks.cpu.freezing                                 # ResNet-44 and its head
    python -m benchmarks.cpu.freezing --models resnet18-224 --train stage4 head

Steps alternate: one with all parameters, one in which all but those of the layers of `--train` are
frozen. `messages` are the bytes of gradients that ranks would exchange in a step. The target for
the head of ResNet-44 is 0.40.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.report import Report
from benchmarks.common.work import WORK, Ours

WARM_UP = 3  # steps; the first one chooses algorithms


def create(name: str, threads: int, train: Sequence[str]) -> Ours:
    """Create one side; everything is trained if `train` is empty."""
    ours = Ours(name, threads)
    if train:
        ours.model.freeze("*")
        ours.model.thaw(*train)
        ours.trainer.rebind()
        ours.trainer.exchange.start(ours.model.buckets)
    return ours


def seconds(ours: Ours) -> float:
    """Time one step."""
    start = time.perf_counter()
    ours.step()
    return time.perf_counter() - start


def measure(report: Report, name: str, threads: int, steps: int, train: Sequence[str]) -> None:
    """Print the row of one model."""
    sides = [create(name, threads, ()), create(name, threads, train)]
    times: list[list[float]] = [[], []]
    for turn in range(WARM_UP + steps):
        for own, ours in zip(times, sides, strict=True):
            elapsed = seconds(ours)
            if turn >= WARM_UP:
                own.append(elapsed)
    whole, part = map(statistics.median, times)
    sent = [sum(b.grads.nbytes for b in ours.model.buckets) for ours in sides]
    report.line(
        f"{name:16}{1e3 * whole:10.2f}{1e3 * part:10.2f}{part / whole:8.3f}"
        f"{sent[0]:12}{sent[1]:10}  {' '.join(train)}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=WORK, default=["resnet44"])
    parser.add_argument("--train", nargs="+", default=["head"], help="layers that are not frozen")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    report = Report(args.output)
    report.line(
        f"{'model':16}{'step ms':>10}{'part ms':>10}{'ratio':>8}{'messages B':>12}{'part B':>10}"
        "  trained"
    )
    for name in args.models:
        measure(report, name, args.threads, args.steps, args.train)


if __name__ == "__main__":
    main()
