"""Scaling from 1 to P ranks, strong and weak: ours beside PyTorch's DistributedDataParallel.

    python -m benchmarks.comm.scaling                     # ResNet-44 on 1 rank and on every core
    python -m benchmarks.comm.scaling --ranks 1 2 4 --runs 5 --picture scaling.png
    sbatch docs/slurm-resnet44.sh                    # on a cluster, with srun for a launcher

Both sides do the same: steps of SGD with momentum on a batch of CIFAR-10's shape that stays in
memory. Strong scaling divides one batch among the ranks, weak scaling gives each rank its own. A
run starts its ranks anew, is a few epochs of 10 steps, and counts by the median of all but the
first. The runs of a round (kind, side, number of ranks) come in random order, so that a busy hour
strikes none more than others.

Columns: images/s of all ranks; speed-up over one rank of the same side, and that by the number of
ranks (efficiency), each the geometric mean of the rounds with its 95 % confidence interval; the
share of a step that is communication not overlapped with computation (ours: time inside its calls;
PyTorch: by how much steps without communication are shorter); and what a rank must send in a step.
Rows with a star have more threads than this machine has cores: they say nothing about scaling.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.comm.intervals import Interval, geometric
from benchmarks.comm.ranks import Run, start
from benchmarks.common.report import WITH_TORCH, Report
from benchmarks.common.work import WORK

PUBLISHED = (12, 10.11)
"""Ranks and speed-up: ResNet-44 on CIFAR-10, DistributedDataParallel, one GPU a rank."""

KINDS = ("strong", "weak")

COLORS = {"ours": "tab:blue", "torch": "tab:orange"}
LOOKS: dict[str, dict[str, Any]] = {
    "strong": {"linestyle": "-", "marker": "o"},
    "weak": {"linestyle": "--", "marker": "s", "markerfacecolor": "none"},
}


class Case(NamedTuple):
    """What is run in every round."""

    kind: str
    side: str
    ranks: int


class Row(NamedTuple):
    """What all rounds say of a case."""

    rate: Interval
    speedup: Interval
    exposed: float
    megabytes: float


def measure(args: argparse.Namespace) -> dict[Case, list[Run]]:
    """Run every case once per round, in random order."""
    sides = ("ours", "torch") if WITH_TORCH and not args.ours else ("ours",)
    cases = [Case(k, s, n) for k in args.kinds for s in sides for n in args.ranks]
    rng = random.Random(args.seed)
    found: dict[Case, list[Run]] = defaultdict(list)
    for _ in range(args.runs):
        for case in rng.sample(cases, len(cases)):
            batch = args.batch or WORK[args.model].batch
            run = start(
                case.side,
                args.model,
                batch * (case.ranks if case.kind == "weak" else max(args.ranks)),
                ranks=case.ranks,
                threads=args.threads,
                epochs=args.epochs,
                launcher=args.launcher,
                nodes=-(-case.ranks // (args.ranks_per_node or case.ranks)),
            )
            found[case].append(run)
    return {case: found[case] for case in cases}


def summarise(found: dict[Case, list[Run]]) -> dict[Case, Row]:
    """Rates, and speed-ups over the fewest ranks in the same round."""
    rows = {}
    for case, runs in found.items():
        rates = [median(run.rates) for run in runs]
        fewest = min(other.ranks for other in found if other[:2] == case[:2])
        base = [median(run.rates) / fewest for run in found[case._replace(ranks=fewest)]]
        rows[case] = Row(
            geometric(rates),
            geometric([rate / one for rate, one in zip(rates, base, strict=True)]),
            fmean(median(run.exposed) for run in runs),
            runs[0].megabytes,
        )
    return rows


def print_rows(report: Report, rows: dict[Case, Row], cores: float, threads: int) -> None:
    """One line per case, and the published figure."""
    report.line(
        f"{'kind':7}{'side':6}{'ranks':>6} {'images/s':>9} {'':16}{'speed-up':>9} {'':16}"
        f"{'efficiency':>10}{'exposed':>9}{'MB/step':>9}"
    )
    for case, row in rows.items():
        star = "*" if case.ranks * threads > cores else ""
        report.line(
            f"{case.kind:7}{case.side:6}{case.ranks:6}{star:1}{row.rate.mean:9.0f} "
            f"{f'({row.rate.low:.0f} to {row.rate.high:.0f})':16}{row.speedup.mean:9.2f} "
            f"{f'({row.speedup.low:.2f} to {row.speedup.high:.2f})':16}"
            f"{row.speedup.mean / case.ranks:10.2f}{row.exposed:9.1%}{row.megabytes:9.2f}"
        )
    ranks, speedup = PUBLISHED
    report.line(
        f"published for ResNet-44 on CIFAR-10 with DistributedDataParallel: {speedup} times on "
        f"{ranks} GPUs (efficiency {speedup / ranks:.2f})"
    )


def draw(path: Path, title: str, rows: dict[Case, Row]) -> None:
    """Draw a PNG: throughput, speed-up, efficiency, communication."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 3, figsize=(14, 8))
    figure.suptitle(title)
    *axes, key = grid.flat
    most = max(case.ranks for case in rows)
    for kind, side in dict.fromkeys((case.kind, case.side) for case in rows):
        chosen = [(case.ranks, row) for case, row in rows.items() if case[:2] == (kind, side)]
        ranks = [n for n, _ in chosen]
        look = {"color": COLORS[side], "label": f"{side}, {kind}", **LOOKS[kind]}
        for axis, intervals in (
            (axes[0], [row.rate for _, row in chosen]),
            (axes[1], [row.speedup for _, row in chosen]),
            (axes[2], [row.speedup.divided(n) for n, row in chosen]),
        ):
            means = [one.mean for one in intervals]
            reach = [
                [max(0.0, one.mean - one.low) for one in intervals],
                [min(one.high, 9 * one.mean) - one.mean for one in intervals],
            ]
            axis.errorbar(ranks, means, reach, capsize=3, **look)
        axes[3].plot(ranks, [100 * row.exposed for _, row in chosen], **look)
        axes[4].plot(ranks, [row.megabytes for _, row in chosen], **look)
    axes[1].plot([1, most], [1, most], "k:", label="ideal")
    axes[2].axhline(1.0, color="k", linestyle=":", label="ideal")
    n, speedup = PUBLISHED
    label = f"published: {speedup} times on {n} GPUs"
    axes[2].axhline(speedup / n, color="tab:green", label=label)
    axes[1].plot([1, most], [speedup / n, speedup / n * most], color="tab:green", label=label)
    key.axis("off")
    key.legend(*axes[1].get_legend_handles_labels(), loc="center", fontsize=11)
    titles = ("images/s", "speed-up", "efficiency", "exposed communication, %", "MB a rank sends")
    for axis, what in zip(axes, titles, strict=True):
        axis.set(title=what, xlabel="ranks", xticks=sorted({case.ranks for case in rows}))
        highest = max(float(max(line.get_ydata())) for line in axis.lines)
        axis.set_ylim(0, 1.2 * highest or 1)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add = parser.add_argument
    add("--model", choices=WORK, default="resnet44")
    add("--ranks", nargs="+", type=int, default=sorted({1, cores or 1}))
    add("--threads", type=int, default=1, help="of each rank")
    add("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    add("--batch", type=int, help="of a rank, in strong scaling where ranks are most")
    add("--runs", type=int, default=5, help="of each case")
    add("--epochs", type=int, default=3, help="of 10 steps, in a run, that count")
    add("--seed", type=int, default=0, help="of the order of the runs")
    add("--ours", action="store_true", help="leave out PyTorch")
    add("--launcher", help="what starts {ranks} ranks on {nodes} nodes; mpirun by default")
    add("--ranks-per-node", type=int, help="what {nodes} is computed from; all by default")
    add("--output", type=Path, help="file that receives the table, too")
    add("--picture", type=Path, help="PNG to draw; needs matplotlib")
    args = parser.parse_args()
    report = Report(args.output)
    report.line(
        f"{args.model}, threads per rank: {args.threads}, {args.runs} rounds of {args.epochs} "
        f"epochs, started by `{args.launcher or 'mpirun -np {ranks}'}`"
    )
    rows = summarise(measure(args))
    print_rows(report, rows, float("inf") if args.launcher else cores or 1, args.threads)
    if args.picture:
        draw(args.picture, f"Data-parallel training of {args.model}", rows)


if __name__ == "__main__":
    main()
