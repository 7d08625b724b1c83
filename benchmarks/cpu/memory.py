"""What a training step was forecast to need of memory, beside what it takes.

    python -m benchmarks.cpu.memory                                  # all models
    python -m benchmarks.cpu.memory --models resnet44 --variants full no-fusion --threads 1 2

Every row is a process of its own, with SGD and momentum. Columns, in MB of 2**20 bytes:

pool       peak of the arrays from the backend's memory pool in a step: forecast, and counted; "="
           where they agree to the byte
resident   growth of the resident memory of the process from before the model was built to its
           peak: forecast, measured, and the quotient. Within 0.15 of 1 is what is promised where
           it is more than 300 MB.
of it      kept: what forward leaves for backward; flat: parameters, gradients and the optimizer's
           slots; scratch: what kernels allocate for themselves, about
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from benchmarks.common.report import Report
from benchmarks.common.work import USUAL, VARIANTS, WORK, Ours, resident

MB = 1 << 20
STEPS = 3  # the first one chooses algorithms


def measure(name: str, threads: int, variant: str) -> dict[str, float]:
    """Forecast and measure one row; to be called in a fresh process."""
    from pydtnn.model.memory import forecast_memory

    ours = Ours(name, threads, variant)
    for _ in range(STEPS):
        ours.model.backend.memory.reset_peak()
        ours.step()
    grown = resident(peak=True) - ours.before
    memory = forecast_memory(ours.model, WORK[name].batch, slots=1)
    return {
        "pool": memory.pool / MB,
        "counted": ours.model.backend.memory.peak / MB,
        "resident": memory.resident / MB,
        "grown": grown,
        "kept": sum(memory.kept) / MB,
        "flat": (memory.parameters + memory.gradients + memory.slots) / MB,
        "scratch": memory.scratch / MB,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=WORK, default=[*USUAL])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["full"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        name, threads, variant = args.row
        print(json.dumps(measure(name, int(threads), variant)))
        return
    report = Report(args.output)
    head = "pool: forecast counted    resident: forecast measured ratio    of it: kept flat scratch"
    report.line(f"{'model':13} batch thr. {'variant':11}  {head}")
    for name, threads, variant in product(args.models, args.threads, args.variants):
        program = [sys.executable, "-m", "benchmarks.cpu.memory"]
        command = [*program, "--row", name, str(threads), variant]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        row = json.loads(done.stdout)
        same = "=" if row["pool"] == row["counted"] else " "
        report.line(
            f"{name:13} {WORK[name].batch:5} {threads:4} {variant:11}  {row['pool']:14.1f}{same}"
            f"{row['counted']:8.1f} {row['resident']:21.0f} {row['grown']:8.0f} "
            f"{row['resident'] / row['grown']:5.2f} {row['kept']:14.1f} {row['flat']:4.0f} "
            f"{row['scratch']:7.0f}"
        )


if __name__ == "__main__":
    main()
