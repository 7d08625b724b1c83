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
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

from report import WITH_TORCH, Report
from work import VARIANTS, WORK, Ours, Theirs, resident

WARM_UP = 3  # steps; the first one chooses algorithms
TURN = 0.1  # s
REST = 0.03  # s: GCC's OpenMP threads spin for 300,000 turns, up to 15 ms, before they sleep

HELD = {
    "ours": {"avx2": {"PYDTNN_ISA": "avx2"}},
    "torch": {"avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}},
}
"""Variables that hold a side to an instruction set."""


class Side:
    """A process that makes steps when it is told to."""

    def __init__(self, side: str, name: str, threads: int, variant: str, isa: str | None) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
        environment |= {"OMP_NUM_THREADS": str(threads)} | HELD[side].get(isa or "", {})
        command = [sys.executable, __file__, "--serve", side, name, str(threads), variant]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.times: list[float] = []

    def ask(self, steps: int) -> dict[str, float]:
        """Have steps made; 0 means that it was the last question."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("step_time: a side has failed; its error is above")
        return json.loads(answer)

    def turn(self, steps: int) -> None:
        """Make a turn and note the seconds per step."""
        self.times.append(self.ask(steps)["seconds"])
        time.sleep(REST)

    def close(self) -> None:
        """End the process; its memory is in `memory`."""
        self.memory = self.ask(0)
        self.process.wait()


def serve(side: str, name: str, threads: int, variant: str) -> None:
    """Be a side: answer each number on standard input with the seconds per step of so many."""
    work = Ours(name, threads, variant) if side == "ours" else Theirs(name, threads)
    pool = work.model.backend.memory if isinstance(work, Ours) else None
    for line in sys.stdin:
        steps = int(line)
        if not steps:
            memory = {"growth": resident(peak=True) - work.before}
            if isinstance(work, Theirs):
                memory["late imports"] = work.late_imports
            if pool:
                memory["arrays"] = pool.peak / 2**20
            print(json.dumps(memory), flush=True)
            return
        if pool:
            pool.reset_peak()
        start = time.perf_counter()
        for _ in range(steps):
            work.step()
        print(json.dumps({"seconds": (time.perf_counter() - start) / steps}), flush=True)


class Row:
    """The runs of one row of the table."""

    def __init__(self, name: str, threads: int, variant: str, isa: str | None) -> None:
        self.task = name, threads, variant, isa
        self.times: dict[str, list[float]] = {}
        self.memory: dict[str, list[dict[str, float]]] = {}
        self.ratios: list[list[float]] = []

    def run(self, turns: int) -> None:
        """Start both sides and let them take turns."""
        sides = {side: Side(side, *self.task) for side in ["ours"] + ["torch"] * WITH_TORCH}
        for side in sides.values():
            seconds = [side.ask(1)["seconds"] for _ in range(WARM_UP)]
        steps = max(1, round(TURN / seconds[-1]))
        for _ in range(turns):
            for side in sides.values():
                side.turn(steps)
        for name, side in sides.items():
            side.close()
            self.times.setdefault(name, []).extend(side.times)
            self.memory.setdefault(name, []).append(side.memory)
        if WITH_TORCH:
            pairs = zip(sides["torch"].times, sides["ours"].times, strict=True)
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
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        side, name, threads, variant = args.serve
        serve(side, name, int(threads), variant)
        return
    report = Report(args.output)
    report.line(head())
    for name in WORK if "all" in args.models else args.models:
        for threads in args.threads:
            for variant in args.variants:
                row = Row(name, threads, variant, args.isa)
                for _ in range(args.runs):
                    row.run(args.turns)
                report.line(row.text())


if __name__ == "__main__":
    main()
