"""Whole training steps on one GPU, ours beside PyTorch's: processes that alternate.

    python -m benchmarks.gpu.step_time                          # the promised rows
    python -m benchmarks.gpu.step_time all --runs 3 --output benchmarks/results/gpu_step_time.txt
    python -m benchmarks.gpu.step_time resnet44-512:bfloat16 --peers eager

Peers: PyTorch eager (channels_last, cudnn.benchmark, fused SGD) and torch.compile with
mode="reduce-overhead". Each side has a process of its own, fresh for every run, all on the same
GPU, of which one works at a time; a turn is as many steps as take a fifth of a second, and ends
when the GPU is done. What a step is: `work.py`. Columns:

images/s   of each side, from the median turn of all runs
to ...     ours to a peer's, of neighbouring turns: each run's median, and of these the median; in
           brackets the quartiles of all turns
MB         of GPU memory that each side has taken for its arrays
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.common.report import WITH_TORCH, Report
from benchmarks.common.sides import PREPARE, Side, SideError, serve
from benchmarks.gpu.work import DTYPES, PEERS, WORK, create_side, release

TURN = 0.2  # s
WARM_UP = 12  # steps: algorithms are chosen, graphs captured, clocks rise
FIRST_STEPS_TIMEOUT_S = 150.0  # s for the first steps, in which PyTorch compiles
AHEAD = 250.0
PROMISED = (
    "resnet44-128:float32",
    "resnet44-128:bfloat16",
    "resnet50-128:bfloat16",
    "resnet50-128:float32",
)
REST = (
    "resnet44-64:float32",
    "resnet44-512:float32",
    "resnet44-2048:float32",
    "resnet50-64:bfloat16",
    "vgg16_bn-128:bfloat16",
    "resnet44-2048:bfloat16",
    "resnet44-64:bfloat16",
    "resnet44-512:bfloat16",
    "vgg16_bn-128:float32",
    "resnet50-64:float32",
)
"""Those that a short call may leave out, the last ones first."""

ROWS = (*PROMISED, *REST)


class Row:
    """The runs of one row of the table.

    Parameters
    ----------
    name, dtype : str
    sides : sequence of str
        The first one is compared with the others.
    """

    def __init__(self, name: str, dtype: str, sides: tuple[str, ...]) -> None:
        self.name, self.dtype, self.sides = name, dtype, sides
        self.times: dict[str, list[float]] = {side: [] for side in sides}
        self.memory = dict.fromkeys(sides, 0.0)
        self.ratios: dict[str, list[list[float]]] = {side: [] for side in sides[1:]}
        self.failed: dict[str, str] = {}
        self.note = ""

    def run(self, processes: dict[str, Side], turns: int, deadline: float) -> None:
        """Alternate all sides; one that fails is left out from then on, and says why."""
        times: dict[str, list[float]] = {side: [] for side in self.sides}
        steps: dict[str, int] = {}
        for side in self.sides:
            self._guarded(side, lambda side=side: processes[side].begin(self.name, self.dtype))
        for side in self.working():
            patience = min(FIRST_STEPS_TIMEOUT_S, deadline - time.monotonic())
            self._guarded(
                side, lambda s=side, p=patience: steps.update({s: warm_up(processes[s], p)})
            )
        for _ in range(turns):
            for side in self.working():
                patience = min(FIRST_STEPS_TIMEOUT_S, deadline - time.monotonic())
                self._guarded(
                    side,
                    lambda s=side, p=patience: times[s].append(processes[s].turn(steps[s], p)),
                )
        for side in self.working():
            self._guarded(side, lambda side=side: self._end(side, processes[side]))
        for side in self.working():
            self.times[side] += times[side]
            if side in self.ratios and "ours" in self.working():
                pairs = zip(times[side], times["ours"], strict=True)
                self.ratios[side].append([theirs / ours for theirs, ours in pairs])

    def working(self) -> list[str]:
        """Return the sides that have not failed."""
        return [side for side in self.sides if side not in self.failed]

    def _guarded(self, side: str, call: Any) -> None:
        try:
            call()
        except SideError as error:
            self.failed[side] = str(error)

    def _end(self, side: str, process: Side) -> None:
        told = process.end()
        self.memory[side] = max(self.memory[side], told["memory"])
        self.note = self.note or told["note"]

    def numbers(self) -> dict[str, Any]:
        """Return the row for a program."""
        batch = WORK[self.name].batch
        return {
            "images/s": {s: batch / statistics.median(t) for s, t in self.times.items() if t},
            "ratio": {side: median_of_medians(r) for side, r in self.ratios.items() if r},
            "MB": self.memory,
            "failed": self.failed,
            "note": self.note,
        }

    def text(self) -> list[str]:
        """Return the row for people, and below it what went wrong."""
        batch = WORK[self.name].batch
        cells = [f"{self.name:14}{batch:6}  {self.dtype:9}"]
        cells += [
            f"{batch / statistics.median(times):10.0f}" if times else f"{'failed':>10}"
            for times in self.times.values()
        ]
        for ratios in self.ratios.values():
            cells.append(f"{quartiles(ratios):>23}")
        cells += [f"{mb:12.0f}" for mb in self.memory.values()]
        notes = [f"    {side}: {reason}" for side, reason in self.failed.items()]
        return [" ".join([*cells, f"  {self.note}"]), *notes]


def start(side: str, device: str) -> Side:
    """Start a side."""
    return Side(["benchmarks.gpu.step_time", "--serve", side, "--device", device])


def warm_up(side: Side, patience: float) -> int:
    """Make the first steps; return how many make a turn."""
    side.turn(WARM_UP, patience)
    return max(1, round(TURN / side.turn(WARM_UP, patience)))


def median_of_medians(runs: list[list[float]]) -> float:
    """Return the median of the runs' medians."""
    return statistics.median(map(statistics.median, runs))


def quartiles(runs: list[list[float]]) -> str:
    """Write a median with the quartiles of all turns."""
    if not runs:
        return "-"
    low, _, high = statistics.quantiles(chain(*runs), n=4)
    return f"{median_of_medians(runs):.2f} ({low:.2f} to {high:.2f})"


def head(sides: tuple[str, ...]) -> str:
    """Return the names of the columns."""
    cells = [f"{'model':14}{'batch':>6}  {'type':9}"]
    cells += [f"{side:>10}" for side in sides]
    cells += [f"{'to ' + side:>23}" for side in sides[1:]]
    cells += [f"{side + ' MB':>12}" for side in sides]
    return " ".join([*cells, "  our steps"])


class Table:
    """Measures rows until there are no more, or no time.

    Parameters
    ----------
    sides : tuple of str
    device : str
    report : Report
    json : Path, optional
        File of the numbers, written anew after each row.
    done : dict
        Rows that are known already: they are kept, and not measured again.
    """

    def __init__(
        self,
        sides: tuple[str, ...],
        device: str,
        report: Report,
        json: Path | None,
        done: dict[str, Any],
    ) -> None:
        self.sides, self.device, self.report, self.json = sides, device, report, json
        self.rows = done
        self._processes: dict[str, Side] = {}
        self.write()

    def measure(self, names: list[str], runs: int, turns: int, seconds: float) -> bool:
        """Measure rows; return whether there was time for all."""
        deadline, longest = time.monotonic() + seconds, 0.0
        for name in names:
            model, dtype = name.split(":")
            start = time.monotonic()
            if start + longest > deadline:
                self.report.line(f"no time was left for {name} and what follows")
                return False
            row = Row(model, dtype, self.sides)
            for _ in range(runs):
                self._run(row, turns, deadline, fresh=runs > 1)
            longest = max(longest, time.monotonic() - start)
            self.rows[f"{model} {dtype}"] = row.numbers()
            for line in row.text():
                self.report.line(line)
            self.write()
        return True

    def _run(self, row: Row, turns: int, deadline: float, fresh: bool) -> None:
        for side in self.sides:
            if side not in self._processes or not self._processes[side].alive():
                self._processes[side] = start(side, self.device)
        row.run(self._processes, turns, deadline)
        if fresh:
            self.close()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all sides."""
        for process in self._processes.values():
            process.close()
        self._processes = {}

    def write(self) -> None:
        """Write the numbers so far."""
        if self.json:
            self.json.write_text(json.dumps(self.rows, indent=1) + "\n")


def compile_ahead(rows: list[str], device: str) -> None:
    """Let PyTorch compile several rows at once, into its cache; times mean nothing."""
    processes = {row: start("compiled", device) for row in rows}
    for row, process in processes.items():
        model, dtype = row.split(":")
        process.ask({"work": [model, dtype]})
        process.ask({"steps": 3})
    for row, process in processes.items():
        try:
            process.answer(PREPARE)
            process.answer(FIRST_STEPS_TIMEOUT_S)
            process.end()
            print(f"{row}: compiled", flush=True)
        except SideError as error:
            print(f"{row}: {error}", flush=True)
        process.close()


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "rows",
        nargs="*",
        type=named_rows,
        help="MODEL-BATCH:TYPE, promised (the default), rest or all",
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--turns", type=int, default=11, help="of each side in a run, at least 2")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try it")
    budget = float(os.environ.get("GPU_CHECK_SECONDS", "inf"))
    parser.add_argument("--seconds", type=float, default=budget - 5, help="s for everything")
    parser.add_argument("--compile", action="store_true", help="only fill PyTorch's cache")
    parser.add_argument(
        "--ahead",
        action="store_true",
        help=f"compile all rows at once at first, where there are {AHEAD:.0f} s or more",
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that --json has")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    parser.add_argument("--json", type=Path, help="file that receives the numbers")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Print the table; the exit status is 0 if all rows were measured."""
    args = arguments().parse_args()
    if args.serve:
        serve(partial(create_side, args.serve, args.device), partial(release, args.device))
        return 0
    rows = [row for names in args.rows or [PROMISED] for row in names]
    if args.compile:
        compile_ahead(rows, args.device)
        return 0
    done = {}
    if args.resume and args.json and args.json.is_file():
        done = json.loads(args.json.read_text())
    rows = [row for row in rows if not complete(done.get(row.replace(":", " ")), args.peers)]
    deadline = time.monotonic() + args.seconds
    if args.ahead and args.seconds > AHEAD and "compiled" in args.peers and WITH_TORCH:
        compile_ahead(rows, args.device)
    report = Report(args.output, keep=args.resume)
    sides = ("ours", *(args.peers if WITH_TORCH else ()))
    report.line(head(sides))
    with Table(sides, args.device, report, args.json, done) as table:
        left = deadline - time.monotonic()
        return 0 if table.measure(rows, args.runs, args.turns, left) else 1


def named_rows(name: str) -> tuple[str, ...]:
    """Return the rows that a word of the command line stands for."""
    known = {"promised": PROMISED, "rest": REST, "all": ROWS}
    known |= {f"{name}:{dtype}": (f"{name}:{dtype}",) for name in WORK for dtype in DTYPES}
    if name not in known:
        raise argparse.ArgumentTypeError(f"no row {name}; there are {', '.join(known)}")
    return known[name]


def complete(row: dict[str, Any] | None, peers: list[str]) -> bool:
    """Whether a row has been measured against all peers."""
    return row is not None and not row["failed"] and set(peers) <= set(row["ratio"])


if __name__ == "__main__":
    sys.exit(main())
