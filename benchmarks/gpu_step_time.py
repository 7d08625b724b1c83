"""Whole training steps on one GPU, ours beside PyTorch's: processes that take turns.

    python benchmarks/gpu_step_time.py                              # ResNet-44, batch 128, TF32
    python benchmarks/gpu_step_time.py --models all --dtypes float32 bfloat16 \
        --runs 3 --output benchmarks/results/gpu_step_time.txt

Peers: PyTorch eager (channels_last, cudnn.benchmark, fused SGD) and torch.compile with
mode="reduce-overhead". A run is a fresh process for each side, all on the same GPU, of which one
works at a time; a turn is as many steps as take a fifth of a second, and ends when the GPU is done.
Columns:

images/s   of each side, from the median turn of all runs
ratio      ours to a peer's, of neighbouring turns: each run's median, and of these the median; in
           brackets the quartiles of all turns
MB         of GPU memory that each side has taken for its arrays
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

from gpu_work import DTYPES, PEERS, WORK, OursOnGpu, TheirsOnGpu
from report import WITH_TORCH, Report

WARM_UP = 12  # steps: algorithms are chosen, graphs captured, clocks rise
TURN = 0.2  # s
SIDES = ("ours", *PEERS) if WITH_TORCH else ("ours",)


class Side:
    """A process that makes steps when it is told to."""

    def __init__(self, side: str, name: str, dtype: str) -> None:
        command = [sys.executable, __file__, "--serve", side, name, dtype]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.times: list[float] = []

    def ask(self, steps: int) -> float:
        """Have steps made and return the seconds per step; 0 ends the process: MB, then."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("gpu_step_time: a side has failed; its error is above")
        return float(json.loads(answer))

    def warm_up(self) -> int:
        """Make the first steps; return how many make a turn."""
        self.ask(WARM_UP)
        return max(1, round(TURN / self.ask(WARM_UP)))

    def close(self) -> float:
        """End the process; return the MB that it has taken."""
        memory = self.ask(0)
        self.process.wait()
        return memory


def serve(side: str, name: str, dtype: str) -> None:
    """Be a side: answer each number on standard input with the seconds per step of so many."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a compiler prints is no answer
    work = OursOnGpu(name, dtype) if side == "ours" else TheirsOnGpu(name, dtype, side)
    for line in sys.stdin:
        steps = int(line)
        if not steps:
            print(json.dumps(work.memory()), file=answers, flush=True)
            return
        work.finish()
        start = time.perf_counter()
        for _ in range(steps):
            work.step()
        work.finish()
        print(json.dumps((time.perf_counter() - start) / steps), file=answers, flush=True)


class Row:
    """The runs of one row of the table."""

    def __init__(self, name: str, dtype: str, sides: tuple[str, ...]) -> None:
        self.name, self.dtype, self.sides = name, dtype, sides
        self.times: dict[str, list[float]] = {side: [] for side in sides}
        self.memory = dict.fromkeys(sides, 0.0)
        self.ratios: dict[str, list[list[float]]] = {side: [] for side in sides[1:]}

    def run(self, turns: int) -> None:
        """Start all sides and let them take turns."""
        sides = {side: Side(side, self.name, self.dtype) for side in self.sides}
        steps = {name: side.warm_up() for name, side in sides.items()}
        for _ in range(turns):
            for name, side in sides.items():
                side.times.append(side.ask(steps[name]))
        for name, side in sides.items():
            self.times[name] += side.times
            self.memory[name] = max(self.memory[name], side.close())
        for name, ratios in self.ratios.items():
            pairs = zip(sides[name].times, sides["ours"].times, strict=True)
            ratios.append([theirs / ours for theirs, ours in pairs])

    def ratio(self, peer: str) -> float:
        """How many times faster ours is: the median of the runs' medians."""
        return statistics.median(map(statistics.median, self.ratios[peer]))

    def text(self) -> str:
        """The row."""
        batch = WORK[self.name].batch
        cells = [f"{self.name:14}{batch:6}  {self.dtype:9}"]
        cells += [f"{batch / statistics.median(times):10.0f}" for times in self.times.values()]
        for peer, ratios in self.ratios.items():
            low, _, high = statistics.quantiles(chain(*ratios), n=4)
            cells.append(f"{self.ratio(peer):8.2f} ({low:.2f} to {high:.2f})")
        cells += [f"{mb:12.0f}" for mb in self.memory.values()]
        return " ".join(cells)


def head(sides: tuple[str, ...]) -> str:
    """The names of the columns."""
    cells = [f"{'model':14}{'batch':>6}  {'type':9}"]
    cells += [f"{side:>10}" for side in sides]
    cells += [f"{'to ' + side:>23}" for side in sides[1:]]
    return " ".join([*cells, *(f"{side + ' MB':>12}" for side in sides)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=[*WORK, "all"], default=["resnet44"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--turns", type=int, default=11, help="of each side in a run, at least 2")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("--json", type=Path, help="file that receives the ratios as numbers")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return
    sides = tuple(side for side in SIDES if side == "ours" or side in args.peers)
    report = Report(args.output)
    report.line("images/s of each side, and ours to theirs")
    report.line(head(sides))
    ratios: dict[str, float] = {}
    for name in WORK if "all" in args.models else args.models:
        for dtype in args.dtypes:
            row = Row(name, dtype, sides)
            for _ in range(args.runs):
                row.run(args.turns)
            report.line(row.text())
            ratios |= {f"{name} {dtype} {peer}": row.ratio(peer) for peer in sides[1:]}
            if args.json:
                args.json.write_text(json.dumps(ratios, indent=1) + "\n")


if __name__ == "__main__":
    main()
