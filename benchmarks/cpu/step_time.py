"""Whole training steps, ours beside PyTorch's: two processes that alternate, step by step.

    python benchmarks/step_time.py                      # ResNet-44, batch 64, 1 thread
    python benchmarks/step_time.py --models all --threads 1 2 --variants full no-winograd \
        --runs 3 --output benchmarks/results/step_time.txt
    python benchmarks/step_time.py --models zoo --compile --runs 3
    python benchmarks/step_time.py --isa avx2           # both sides held to AVX2
    python benchmarks/step_time.py --dtype bfloat16     # beside PyTorch's autocast

A step is forward, loss, backward and update (SGD with momentum), in float32 or in mixed precision
with bfloat16, which for PyTorch is `torch.autocast`. A run is a fresh pair
of processes; a turn is one step, or as many as take a tenth of a second. Columns:

images/s   of both sides, from the median turn of all runs
ratio      of neighbouring turns: each run's median, and of these the median; in brackets the
           quartiles of all turns
MB         peak of resident memory over that after the imports, the largest of the runs, and what
           part ours is of theirs; "and late" counts as theirs, too, what PyTorch imports only when
           it makes an optimizer, which "torch MB" leaves out; "arrays" is the peak of our arrays
           alone, counted by their pool, in a step after the first
compiled   the ratio to PyTorch with `torch.compile` in its default mode, for --compile
float32    the ratio to our step in float32, for --dtype bfloat16, and what part of its growth of
           memory ours is

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
from benchmarks.common.work import USUAL, VARIANTS, WORK, ZOO, Ask, resident
from pydtnn.utils.machine import restart_peak

WARM_UP = 3  # steps; the first one chooses algorithms
TURN = 0.1  # s
TURN_TIMEOUT_S = 3600.0  # s for a turn
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

    def __init__(self, name: str, threads: int, dtype: str) -> None:
        import torch

        import benchmarks.common.torch_twin  # noqa: F401 (its imports are not part of a step)

        torch.set_num_threads(threads)
        imported = resident()
        import torch._dynamo

        restart_peak()
        self.before = resident()
        self.late_imports = self.before - imported
        super().__init__(WORK[name], dtype=dtype)

    def memory(self) -> dict[str, float]:
        """Growth of the process, and what is imported late, in MB."""
        growth = resident(peak=True) - self.before
        return {"growth": growth, "late imports": self.late_imports}


def create_side(side: str, name: str, threads: int, variant: str, dtype: str) -> Ours | Theirs:
    """Make a side of some work."""
    if side in ("ours", "float32"):
        return Ours(name, threads, variant, dtype="float32" if side == "float32" else dtype)
    theirs = Theirs(name, threads, dtype)
    if side == "compiled":
        import torch

        theirs.net = torch.compile(theirs.net)
    return theirs


def start(side: str, threads: int, isa: str | None) -> Side:
    """Start a side."""
    variables = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    variables |= {"OMP_NUM_THREADS": str(threads)} | HELD.get(side, {}).get(isa or "", {})
    return Side(["benchmarks.cpu.step_time", "--serve", side], variables)


class Row:
    """The runs of one row of the table."""

    def __init__(
        self, name: str, threads: int, variant: str, dtype: str, isa: str | None, compiled: bool
    ) -> None:
        self.task = name, threads, variant, dtype, isa
        self.sides = ["ours", *["torch"] * WITH_TORCH, *["compiled"] * compiled]
        self.sides += ["float32"] * (dtype != "float32")
        self.times: dict[str, list[float]] = {}
        self.memory: dict[str, list[dict[str, float]]] = {}
        self.ratios: dict[str, list[list[float]]] = {}

    def run(self, turns: int) -> None:
        """Start both sides and alternate them."""
        name, threads, variant, dtype, isa = self.task
        sides = {side: start(side, threads, isa) for side in self.sides}
        times: dict[str, list[float]] = {side: [] for side in sides}
        for side, process in sides.items():
            process.begin(side, name, threads, variant, dtype)
            seconds = [process.turn(1, TURN_TIMEOUT_S) for _ in range(WARM_UP)]
        steps = max(1, round(TURN / seconds[-1]))
        for _ in range(turns):
            for side, process in sides.items():
                times[side].append(process.turn(steps, TURN_TIMEOUT_S))
                time.sleep(REST)
        for side, process in sides.items():
            self.memory.setdefault(side, []).append(process.end()["memory"])
            process.close()
            self.times.setdefault(side, []).extend(times[side])
        for side in self.sides[1:]:
            pairs = zip(times[side], times["ours"], strict=True)
            self.ratios.setdefault(side, []).append([theirs / ours for theirs, ours in pairs])

    def text(self) -> str:
        """The row."""
        name, threads, variant, *_ = self.task
        batch = WORK[name].batch
        cells = [f"{name:13}{batch:6}{threads:8}  {variant:12}"]
        sides = self.sides[: 1 + WITH_TORCH]
        times = [self.times[side] for side in sides]
        cells += [f"{batch / statistics.median(own):9.1f}" for own in times]
        if WITH_TORCH:
            cells.append(_ratio(self.ratios["torch"]))
        runs = [self.memory[side] for side in sides]
        growth = [max(run["growth"] for run in own) for own in runs]
        cells += [f"{mb:8.0f}" for mb in growth]
        if WITH_TORCH:
            late = self.memory["torch"][0]["late imports"]
            cells += [f"{growth[0] / growth[1]:10.2f}", f"{growth[0] / (growth[1] + late):9.2f}"]
        cells.append(f"{self.memory['ours'][0]['arrays']:8.1f}")
        if "compiled" in self.sides:
            cells.append(_ratio(self.ratios["compiled"]))
        if "float32" in self.sides:
            single = max(run["growth"] for run in self.memory["float32"])
            cells += [_ratio(self.ratios["float32"]), f"{growth[0] / single:7.2f}"]
        return " ".join(cells)


def _ratio(runs: list[list[float]]) -> str:
    """Each run's median, of these the median, and the quartiles of all turns."""
    median = statistics.median(map(statistics.median, runs))
    low, _, high = statistics.quantiles(chain(*runs), n=4)
    return f"{median:8.2f} ({low:.2f} to {high:.2f})"


def head(compiled: bool, half: bool) -> str:
    """The names of the columns."""
    sides = ["ours"] + ["torch"] * WITH_TORCH
    cells = [f"{'model':13}{'batch':>6}{'threads':>8}  {'variant':12}"]
    cells += [f"{side + ' im/s':>9}" for side in sides]
    cells += [f"{'ratio':>8} {'':14}"] * WITH_TORCH
    cells += [f"{side + ' MB':>8}" for side in sides]
    cells += [f"{'of theirs':>10}", f"{'and late':>9}"] * WITH_TORCH
    cells += [f"{'arrays':>8}", *[f"{'compiled':>8} {'':14}"] * compiled]
    return " ".join([*cells, *[f"{'float32':>8} {'':14} {'memory':>7}"] * half]).rstrip()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    models = [*WORK, "all", "zoo"]
    parser.add_argument("--models", nargs="+", choices=models, default=["resnet44"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["full"])
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--isa", choices=["avx2"], help="hold both sides to it")
    parser.add_argument("--turns", type=int, default=11, help="of each side in a run, at least 2")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(create_side)
        return
    if args.compile and not WITH_TORCH:
        parser.error("--compile requires PyTorch; run `make parity`, which installs it")
    report = Report(args.output)
    report.line(head(args.compile, args.dtype != "float32"))
    sets = {"all": USUAL, "zoo": ZOO}
    for name in chain.from_iterable(sets.get(given, [given]) for given in args.models):
        for threads in args.threads:
            for variant in args.variants:
                row = Row(name, threads, variant, args.dtype, args.isa, args.compile)
                for _ in range(args.runs):
                    try:
                        row.run(args.turns)
                    except SideError as error:
                        sys.exit(f"step_time: {error}")
                report.line(row.text())


if __name__ == "__main__":
    main()
