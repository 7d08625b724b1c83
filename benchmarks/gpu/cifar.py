"""One recipe, two libraries: ResNet-44 on CIFAR-10 on one GPU, test accuracy and wall time of both.

    python -m benchmarks.gpu.cifar --data FOLDER --epochs 30
    python -m benchmarks.gpu.cifar --data FOLDER --seconds 300      # as many epochs as fit

Both sides begin with the same weights and see the same batches in the same order, cropped and
flipped alike: the same loader gathers uint8 images on the host, and each side augments and
normalises on the GPU, one batch ahead. SGD with momentum under a triangular learning rate, weight
decay of all but biases and norms. PyTorch runs eager or compiled (the last, smaller batch of an
epoch eager), channels_last, cudnn.benchmark, fused SGD. A side is a process of its own. Seconds are
those of training from the first batch to the last, with the choice of algorithms, the capture of
graphs and compilation; of that, the first ten steps are told apart, and the one evaluation at the
end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.processes import end
from benchmarks.common.report import WITH_TORCH, Report
from benchmarks.gpu.recipe import BATCH, Recipe, ours, theirs
from benchmarks.gpu.work import DTYPES, PEERS

MOST_EPOCHS = 30

STEP = {"ours": 0.003, "eager": 0.009, "compiled": 0.004}
"""Guesses of the seconds per step of each side, where none were measured."""

FIXED = {"ours": 15.0, "eager": 15.0, "compiled": 70.0}
"""Seconds of each side besides its steps: imports, data, first steps, evaluation."""


def epochs_that_fit(seconds: float, steps: int, sides: list[str], rates: dict[str, float]) -> int:
    """Return how many epochs all sides can train for in so many seconds, one after the other.

    Parameters
    ----------
    seconds : float
    steps : int
        Of an epoch.
    sides : list of str
    rates : dict
        Seconds per step of the sides for which they were measured.
    """
    epoch = steps * sum(1.15 * rates.get(side, STEP[side]) for side in sides)
    left = seconds - sum(FIXED[side] for side in sides)
    return max(3, min(MOST_EPOCHS, math.floor(left / epoch)))


def measured_rates(path: Path | None, dtype: str) -> dict[str, float]:
    """Return the seconds per step that `step_time.py` has measured, as far as it has."""
    try:
        rows = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    rates = rows.get(f"resnet44-{BATCH} {dtype}", {}).get("images/s", {})
    return {side: BATCH / rate for side, rate in rates.items()}


class Table:
    """Runs the sides one after the other and writes down what they tell."""

    def __init__(self, report: Report, json: Path | None, epochs: int, dtype: str) -> None:
        self.report, self.json = report, json
        self.found: dict[str, Any] = {"epochs": epochs, "dtype": dtype, "sides": {}, "failed": {}}
        self.write()

    def run(self, side: str, command: list[str], deadline: float) -> None:
        """Run a side to its end, or to the end of the time."""
        process = subprocess.Popen([*command, "--serve", side], stdout=subprocess.PIPE, text=True)
        left = max(1.0, deadline - time.monotonic())
        try:
            output, _ = process.communicate(timeout=left if math.isfinite(left) else None)
            failed = f"status {process.returncode}; the log has its last words"
        except subprocess.TimeoutExpired:
            end(process)
            (output, _), failed = process.communicate(), "not done in its time"
        told = [json.loads(line) for line in output.splitlines() if line.endswith("}")]
        for line in told:
            if "epoch" in line:
                self.report.line(
                    f"{side:10}epoch {line['epoch']:3}  loss {line['loss']:.4f}  "
                    f"{line['seconds']:8.2f} s"
                )
        if told and "accuracy" in told[-1]:
            self.found["sides"][side] = told[-1]
        else:
            self.found["failed"][side] = failed
        self.write()

    def summary(self) -> None:
        """Write the accuracies and times below each other."""
        self.report.line(f"\n{'side':10}{'accuracy':>10}{'training':>12}{'first':>9}{'testing':>9}")
        for side, s in self.found["sides"].items():
            self.report.line(
                f"{side:10}{s['accuracy']:10.2%}{s['seconds']:10.1f} s{s['first']:7.1f} s"
                f"{s['evaluation']:7.1f} s"
            )
        for side, reason in self.found["failed"].items():
            self.report.line(f"{side:10}{reason}")

    def write(self) -> None:
        """Write the numbers so far."""
        if self.json:
            self.json.write_text(json.dumps(self.found, indent=1) + "\n")


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--data", default="", help="folder of CIFAR-10")
    parser.add_argument("--dataset", default="cifar10", help="another one, to try the script out")
    parser.add_argument("--model", default="resnet44", help="likewise")
    parser.add_argument("--samples", type=int, default=0, help="train with fewer, likewise")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="likewise")
    parser.add_argument("--epochs", type=int, help="by default as many as fit into the time")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    budget = float(os.environ.get("GPU_CHECK_SECONDS", "inf"))
    parser.add_argument("--seconds", type=float, default=budget - 5, help="s for everything")
    parser.add_argument("--steps", type=Path, help="numbers of gpu/step_time.py, to plan with")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("--json", type=Path, help="file that receives the numbers")
    parser.add_argument("--serve", choices=["ours", *PEERS], help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Print the table; the exit status is 0 if all sides have come to their end."""
    args = arguments().parse_args()
    what = [args.dataset, args.model, args.data, args.samples]
    if args.serve:
        answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
        recipe = Recipe(*what, args.epochs, args.dtype, args.device)

        def told(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=answers, flush=True)

        if args.serve == "ours":
            told(ours(recipe, told))
        else:
            told(theirs(recipe, told, args.serve))
        return 0
    deadline = time.monotonic() + args.seconds
    sides = ["ours", *(args.peers if WITH_TORCH else ())]
    epochs = args.epochs
    if epochs is None:
        steps = -(-(args.samples or 50000) // BATCH)
        rates = measured_rates(args.steps, args.dtype)
        epochs = epochs_that_fit(min(args.seconds, 1e6), steps, sides, rates)
    report = Report(args.output)
    report.line(f"{args.model}, {args.dataset}, batch {BATCH}, {epochs} epochs, {args.dtype}")
    table = Table(report, args.json, epochs, args.dtype)
    command = [sys.executable, "-m", "benchmarks.gpu.cifar"]
    command += ["--epochs", str(epochs), "--dtype", args.dtype]
    for name, value in zip(("dataset", "model", "data", "samples"), what, strict=True):
        command += [f"--{name}", str(value)]
    for side in sides:
        table.run(side, [*command, "--device", args.device], deadline)
    table.summary()
    return 0 if not table.found["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
