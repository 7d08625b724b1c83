"""Data-parallel training: `pydtnn.train` under mpirun beside PyTorch's DistributedDataParallel.

    python -m benchmarks.comm.ddp                               # ResNet-44, 2 ranks of 1 thread
    python -m benchmarks.comm.ddp --ranks 4 --runs 5 --output benchmarks/results/ddp.txt

Ours is the command that users type, on synthetic images or random text: reading, metrics and
progress are part of it. Theirs is the leanest loop there is (`channels_last`, gloo, one batch that
stays in memory). Batches per rank are those of `benchmarks.common.work`, the optimizer is SGD with
momentum. The sides run one after the other, again and again, never at the same time: a rank that
waits for a message keeps its core busy. A run is a few epochs of 10 steps, of which the first does
not count. Columns: images/s (or sequences/s) of all ranks, median over the epochs of all runs; the
ratio of each run's medians, as median (least to greatest); and the peak of resident memory per
rank, Python and libraries included.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.comm.rank import STEPS
from benchmarks.comm.ranks import default_launcher, launch, start
from benchmarks.common.report import WITH_TORCH, Report
from benchmarks.common.work import WORK

NAMES = [name for name, work in WORK.items() if len(work.shape) in (1, 3)]
"""Networks of sequences and images; there are no synthetic volumes."""


class Run(NamedTuple):
    """What a run says of itself: images/s of each epoch but the first, MB per rank."""

    rates: list[float]
    memory: float

    @property
    def rate(self) -> float:
        """Median of the epochs."""
        return statistics.median(self.rates)


def run_ours(name: str, ranks: int, threads: int, epochs: int) -> Run:
    """Train with the command line under mpirun and read what it prints."""
    work = WORK[name]
    test, samples = ranks * work.batch, STEPS * ranks * work.batch
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any]
        if len(work.shape) == 1:
            data, options = ["text", "--data-dir", folder], {"length": work.shape[0]}
            text = np.random.default_rng(0).bytes((samples + test + 1) * work.shape[0] * 10 // 9)
            Path(folder, "text.txt").write_bytes(text)
        else:
            data, options = ["synthetic"], {"samples": samples, "test_samples": test}
            options |= {"classes": work.classes, "shape": work.shape}
        command = [
            *(sys.executable, "-m", "pydtnn.train"),
            *("--model", work.net, "--batch-size", str(work.batch), "--threads", str(threads)),
            *("--dataset", *data, "--dataset-options", json.dumps(options)),
            *("--epochs", str(epochs), "--steps-per-epoch", str(STEPS), "--lr", "0.01"),
            *("--checkpoint-every", ":epochs=0", "--output-dir", str(Path(folder) / "run")),
        ]
        text = launch(default_launcher(), ranks, threads, command)
    rates = re.findall(r"^epoch .* val_loss .* ([\d.]+) samples/s  [\d.]+ s$", text, re.M)
    (memory,) = re.findall(r"^peak memory per rank +([\d.]+) MB", text, re.M)
    return Run([float(rate) for rate in rates[1:]], float(memory))


def run_torch(name: str, ranks: int, threads: int, epochs: int) -> Run:
    """Let PyTorch's ranks train."""
    batch = ranks * WORK[name].batch
    run = start("torch", name, batch, ranks=ranks, threads=threads, epochs=epochs - 1)
    return Run(run.rates, run.memory)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["resnet44"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--epochs", type=int, default=4, help=f"of {STEPS} steps, in a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    if args.epochs < 2:
        parser.error("--epochs must be at least 2: the first does not count")
    sides = {"ours": run_ours} | ({"torch": run_torch} if WITH_TORCH else {})
    report = Report(args.output)
    cells = [f"{f'{side} images/s':>16}" for side in sides] + [f"{'ratio':>8} {'':14}"] * WITH_TORCH
    cells += [f"{f'{side} MB':>9}" for side in sides]
    report.line(f"{'model':13}{'ranks':>6}{'threads':>8}{'batch':>6} " + " ".join(cells))
    for name in args.models:
        runs: dict[str, list[Run]] = {side: [] for side in sides}
        for _ in range(args.runs):
            for side, run in sides.items():
                runs[side].append(run(name, args.ranks, args.threads, args.epochs))
        report.line(f"{name:13}{args.ranks:6}{args.threads:8}{WORK[name].batch:6} " + row(runs))


def row(runs: dict[str, list[Run]]) -> str:
    """Rates, ratio and memory of one model."""
    cells = [
        f"{statistics.median(rate for run in side for rate in run.rates):16.0f}"
        for side in runs.values()
    ]
    if "torch" in runs:
        pairs = zip(runs["ours"], runs["torch"], strict=True)
        ratios = sorted(ours.rate / theirs.rate for ours, theirs in pairs)
        cells.append(f"{statistics.median(ratios):8.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    cells += [f"{max(run.memory for run in side):9.0f}" for side in runs.values()]
    return " ".join(cells)


if __name__ == "__main__":
    main()
