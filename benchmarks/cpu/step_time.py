"""Whole training steps, ours beside PyTorch's: two processes that take turns, step by step.

    python benchmarks/step_time.py                      # ResNet-44, batch 64, 1 thread
    python benchmarks/step_time.py --models all --threads 1 2 --variants full no-winograd \
        --runs 3 --output benchmarks/results/step_time.txt
    python benchmarks/step_time.py --isa avx2           # both sides held to AVX2

A step is forward, loss, backward and update (SGD with momentum) in float32. A run is a fresh pair
of processes; a turn is one step, or as many as take a tenth of a second. Columns:

images/s   of both sides, from the median turn of all runs
ratio      of neighbouring turns: each run's median, and of these the median; in brackets the
           quartiles of all turns
MB         peak of resident memory over that after the imports, the largest of the runs, and what
           part ours is of theirs; "and late" counts as theirs, too, what PyTorch imports only when
           it makes an optimizer, which "torch MB" leaves out; "arrays" is the peak of our arrays
           alone, counted by their pool, in a step after the first

Without PyTorch, our columns stand alone. Threads that wait for work spin for a while after a step;
a rest between two turns keeps them from disturbing the other side.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from itertools import chain
from pathlib import Path

from benchmarks.common import work
from benchmarks.common.report import WITH_TORCH, Report
from benchmarks.common.sides import Side, SideError, serve
from benchmarks.common.work import VARIANTS, WORK, Ask, forget_peak, resident

WARM_UP = 3  # steps; the first one chooses algorithms
TURN = 0.1  # s
PATIENCE = 3600.0  # s for a turn
REST = 0.03  # s: GCC's OpenMP threads spin for 300,000 turns, up to 15 ms, before they sleep

HELD = {
    "ours": {"avx2": {"PYDTNN_ISA": "avx2"}},
    "torch": {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}},
}
"""Variables that hold a side to an instruction set."""


class Ours(work.Ours):
    """Our side, with the memory that it needs."""

    def turns(self, ask: Ask) -> None:
        pool = self.model.backend.memory

        def ask_and_forget(seconds: float | None) -> int:
            if steps := ask(seconds):
                pool.reset_peak()
            return steps

        super().turns(ask_and_forget)

    def memory(self) -> dict[str, float]:
        """Growth of the process, and the peak of our arrays, in MB."""
        growth = resident(peak=True) - self.before
        return {"growth": growth, "arrays": self.model.backend.memory.peak / 2**20}


class Theirs(work.Theirs):
    """PyTorch's side, with the memory that it needs.

    A part of PyTorch imports itself only when the first optimizer is made: `before` is with that
    part, and its size is `late_imports`.
    """

    def __init__(self, name: str, threads: int) -> None:
        import torch

        import benchmarks.common.torch_twin  # noqa: F401 (its imports are not part of a step)

        torch.set_num_threads(threads)
        imported = resident()
        import torch._dynamo

        forget_peak()
        self.before = resident()
        self.late_imports = self.before - imported
        super().__init__(WORK[name])

    def memory(self) -> dict[str, float]:
        """Growth of the process, and what is imported late, in MB."""
        growth = resident(peak=True) - self.before
        return {"growth": growth, "late imports": self.late_imports}


def create_side(side: str, name: str, threads: int, variant: str) -> Ours | Theirs:
    """Make a side of some work."""
    return Ours(name, threads, variant) if side == "ours" else Theirs(name, threads)


def start(side: str, threads: int, isa: str | None) -> Side:
    """Start a side."""
    variables = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    variables |= {"OMP_NUM_THREADS": str(threads)} | HELD[side].get(isa or "", {})
    return Side(["benchmarks.cpu.step_time", "--serve", side], variables)


class Row:
    """The runs of one row of the table."""

    def __init__(self, name: str, threads: int, variant: str, isa: str | None) -> None:
        self.task = name, threads, variant, isa
        self.times: dict[str, list[float]] = {}
        self.memory: dict[str, list[dict[str, float]]] = {}
        self.ratios: list[list[float]] = []

    def run(self, turns: int) -> None:
        """Start both sides and let them take turns."""
        name, threads, variant, isa = self.task
        names = ["ours"] + ["torch"] * WITH_TORCH
        sides = {side: start(side, threads, isa) for side in names}
        times: dict[str, list[float]] = {side: [] for side in sides}
        for side, process in sides.items():
            process.begin(side, name, threads, variant)
            seconds = [process.turn(1, PATIENCE) for _ in range(WARM_UP)]
        steps = max(1, round(TURN / seconds[-1]))
        for _ in range(turns):
            for side, process in sides.items():
                times[side].append(process.turn(steps, PATIENCE))
                time.sleep(REST)
        for side, process in sides.items():
            self.memory.setdefault(side, []).append(process.end()["memory"])
            process.close()
            self.times.setdefault(side, []).extend(times[side])
        if WITH_TORCH:
            pairs = zip(times["torch"], times["ours"], strict=True)
            self.ratios.append([theirs / ours for theirs, ours in pairs])

    def text(self) -> str:
        """The row."""
        name, threads, variant, _ = self.task
        batch = WORK[name].batch
        cells = [f"{name:13}{batch:6}{threads:8}  {variant:12}"]
        cells += [f"{batch / statistics.median(times):9.0f}" for times in self.times.values()]
        if WITH_TORCH:
            median = statistics.median(map(statistics.median, self.ratios))
            low, _, high = statistics.quantiles(chain(*self.ratios), n=4)
            cells.append(f"{median:8.2f} ({low:.2f} to {high:.2f})")
        growth = [max(run["growth"] for run in runs) for runs in self.memory.values()]
        cells += [f"{mb:8.0f}" for mb in growth]
        if WITH_TORCH:
            late = self.memory["torch"][0]["late imports"]
            cells += [f"{growth[0] / growth[1]:10.2f}", f"{growth[0] / (growth[1] + late):9.2f}"]
        cells.append(f"{self.memory['ours'][0]['arrays']:8.1f}")
        return " ".join(cells)


def head() -> str:
    """The names of the columns."""
    sides = ["ours"] + ["torch"] * WITH_TORCH
    cells = [f"{'model':13}{'batch':>6}{'threads':>8}  {'variant':12}"]
    cells += [f"{side + ' im/s':>9}" for side in sides]
    cells += [f"{'ratio':>8} {'':14}"] * WITH_TORCH
    cells += [f"{side + ' MB':>8}" for side in sides]
    cells += [f"{'of theirs':>10}", f"{'and late':>9}"] * WITH_TORCH
    return " ".join([*cells, f"{'arrays':>8}"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    models = [*WORK, "all"]
    parser.add_argument("--models", nargs="+", choices=models, default=["resnet44"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["full"])
    parser.add_argument("--isa", choices=["avx2"], help="hold both sides to it")
    parser.add_argument("--turns", type=int, default=11, help="of each side in a run, at least 2")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(create_side)
        return
    report = Report(args.output)
    report.line(head())
    for name in WORK if "all" in args.models else args.models:
        for threads in args.threads:
            for variant in args.variants:
                row = Row(name, threads, variant, args.isa)
                for _ in range(args.runs):
                    try:
                        row.run(args.turns)
                    except SideError as error:
                        sys.exit(f"step_time: {error}")
                report.line(row.text())


if __name__ == "__main__":
    main()
