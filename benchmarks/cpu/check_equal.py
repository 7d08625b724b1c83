"""Cost of the comparison of ranks (`CheckEqual`).

    python -m benchmarks.cpu.check_equal                       # two ranks, threads of this process
    mpiexec -n 2 python -m benchmarks.cpu.check_equal --models resnet44 vgg16_bn mlp

`arrays` are the parameters and the state of the optimizer that are compared, and `compare` the
median time of a comparison, in which all arrays are hashed and ranks wait for each other. The cost
is that of a comparison every 100 steps for the time of a step. The target is 0.5 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import Report
from benchmarks.common.work import WORK, create_trainer
from pydtnn.callbacks import CheckEqual
from pydtnn.comm import Communicator, create_communicator, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.kernels import create_backend


class Timed(CheckEqual):
    """The check, with a comparison after each step, and the times of both."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []
        self.comparisons: list[float] = []
        self.nbytes = 0
        self._end = 0.0

    def on_step_end(self, trainer: Any) -> None:
        """Compare, and record the times."""
        start = time.perf_counter()
        self.steps.append(start - self._end)
        self.compare(trainer)
        self._end = time.perf_counter()
        self.comparisons.append(self._end - start)
        self.nbytes = sum(watched.array.nbytes for watched in self._watched)


def measure(comm: Communicator, name: str, threads: int, steps: int) -> str:
    """Return the row of one model."""
    work, check = WORK[name], Timed()
    steps += 2
    x, y = work.data()
    repeats = steps * comm.size
    data = ArrayDataset(np.tile(x, (repeats, 1, 1, 1)), np.tile(y, repeats), classes=work.classes)
    trainer = create_trainer(work, create_backend(threads=threads), comm)
    trainer.callbacks.append(check)
    trainer.fit(data, batch_size=work.batch)
    step = statistics.median(check.steps)
    compared = statistics.median(check.comparisons)
    cost = compared / check.every / step
    return (
        f"{name:16}{check.nbytes / 1e6:10.1f}{1e3 * step:10.2f}"
        f"{1e3 * compared:12.3f}{100 * cost:8.2f}%"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=WORK, default=["resnet44", "vgg16_bn"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    comm = create_communicator()
    report = Report(args.output) if comm.rank == 0 else None
    if report:
        report.line(f"{'model':16}{'arrays MB':>10}{'step ms':>10}{'compare ms':>12}{'cost':>9}")
    for name in args.models:
        own = name, args.threads, args.steps
        row = run_threads(2, measure, *own)[0] if comm.size == 1 else measure(comm, *own)
        if report:
            report.line(row)


if __name__ == "__main__":
    main()
