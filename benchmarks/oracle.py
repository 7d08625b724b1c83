"""Predicted times of training steps, and predicted memory, beside measured ones.

    python -m benchmarks.oracle                                    # on this machine, all cases
    python -m benchmarks.oracle --networks resnet20 --plans one data-2 --turns 5
    python -m benchmarks.oracle --networks gpt moe_gpt             # schemes of transformers
    python -m benchmarks.oracle --crowded                          # here, with 3, 4 and 8 ranks
    python -m benchmarks.oracle --cluster --output FILE            # on emulated clusters

On this machine the ranks share a host. On emulated clusters (`benchmarks.comm.cluster`: for root,
with Open MPI beside Python), four ranks are on 2 hosts of 2 ranks or on 4 hosts, with links of 100
Mbit/s and 1 Gbit/s; all of them share the cores of this machine.

In every turn a step is predicted as `python -m pydtnn.train` does at its start: the compute of all
ranks is measured (`pydtnn.tools.perfmodel.compute.measured`), and virtual ranks add the messages,
on the platform that was measured before the first turn. Then it is measured. Rows are medians
over the turns. `accuracy` is 1 - abs(predicted - measured) / measured. `memory` is the growth of
the process of the largest rank, in MiB. `tau` is Kendall's rank correlation of predicted and
measured times of the plans of a network and batch, and `regret` the measured time of the plan that
is predicted to be the fastest, relative to that of the fastest one, minus 1.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, groupby
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks.accuracy.cases import (
    BATCHES,
    CROWDED,
    HERE,
    NETWORKS,
    ON_CLUSTER,
    PLANS,
    SCHEMES,
    USUAL,
    ranks_of,
)
from benchmarks.comm.ranks import default_launcher, launch
from benchmarks.common.report import Report

RATES = ("100mbit", "1gbit")
SHAPES = ("2x2", "4x1")
CLUSTER_NETWORKS = ("resnet20", "vgg11")
HERE_NETWORKS = ("resnet20", "resnet44", "vgg16_bn", "cnn", "resnet18")

Run = Callable[[int, list[str]], str]
"""Runs a command on so many ranks and returns its output."""


class Row(NamedTuple):
    """Result of one case: times of a step in s, memory in MiB."""

    layout: str
    network: str
    plan: str
    batch: int
    measured: float
    predicted: float
    resident: float
    memory: float

    @property
    def accuracy(self) -> float:
        """1 - abs(error) of the time."""
        return 1 - abs(self.predicted - self.measured) / self.measured

    @property
    def memory_error(self) -> float:
        """Relative error of the memory."""
        return self.memory / self.resident - 1

    def __str__(self) -> str:
        return (
            f"{self.layout:13}{self.network:11}{self.plan:16}{self.batch:6}"
            f"{1e3 * self.measured:12.2f}{1e3 * self.predicted:13.2f}{self.accuracy:10.1%}"
            f"{self.resident:11.0f}{self.memory:11.0f}{self.memory_error:+8.1%}"
        )


TITLE = (
    f"{'':13}{'network':11}{'plan':16}{'batch':>6}{'measured ms':>12}{'predicted ms':>13}"
    f"{'accuracy':>10}{'memory MiB':>11}{'predicted':>11}{'error':>8}"
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--cluster", action="store_true", help="on emulated clusters")
    parser.add_argument("--crowded", action="store_true", help="plans of 3, 4 and 8 ranks")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS)
    parser.add_argument("--plans", nargs="+", choices=PLANS)
    parser.add_argument("--batches", nargs="+", type=int, help="samples of all ranks per step")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the links of a cluster")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="HOSTSxRANKS of a cluster")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--quick", action="store_true", help="one turn of two steps")
    parser.add_argument("--before", default="", help="command before each rank: 'chrt --fifo 1'")
    parser.add_argument("--output", type=Path, help="file that receives the tables, too")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.steps = 1, 2
    report = Report(args.output)
    networks = args.networks or (CLUSTER_NETWORKS if args.cluster else HERE_NETWORKS)
    usual_plans = ON_CLUSTER if args.cluster else CROWDED if args.crowded else None
    report.line(TITLE)
    rows: list[Row] = []
    for layout in [f"{r} {s}" for r in args.rates for s in args.shapes] if args.cluster else [""]:
        with on(layout) as run:
            for network in networks:
                usual = BATCHES.get(network, USUAL)
                batches = args.batches or (usual[-1:] if args.cluster else usual)
                for plan in args.plans or usual_plans or SCHEMES.get(network, HERE):
                    for batch in batches:
                        row = compare(run, layout, network, plan, batch, args)
                        report.line(str(row))
                        rows.append(row)
    for line in summary(rows):
        report.line(line)


def compare(
    run: Run, layout: str, network: str, plan: str, batch: int, args: argparse.Namespace
) -> Row:
    """Compare one case."""
    case = f"{network}/{plan}/{batch}"
    numbers = ["--turns", str(args.turns), "--steps", str(args.steps)]
    command = ["python", "-m", "benchmarks.accuracy.rank", case, *numbers]
    text = run(ranks_of(plan), [*shlex.split(args.before), *command])
    found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    return Row(
        layout,
        network,
        plan,
        batch,
        median(found["measured"]),
        median(found["predicted"]),
        found["resident"],
        found["memory"],
    )


@contextmanager
def on(layout: str) -> Iterator[Run]:
    """Context in which commands run on a layout, such as "1gbit 2x2"; on this machine if empty."""
    if not layout:

        def here(ranks: int, command: list[str]) -> str:
            started = [sys.executable if word == "python" else word for word in command]
            return launch(default_launcher() if ranks > 1 else "", ranks, 1, started)

        yield here
        return
    from benchmarks.comm.cluster_launch import Cluster, why_not

    if why_not():
        sys.exit(f"oracle: {why_not()}.")
    rate, _, shape = layout.partition(" ")
    hosts, _, ranks = shape.partition("x")
    with Cluster(int(hosts), int(ranks), rate, asleep=True) as cluster:

        def run(ranks: int, command: list[str]) -> str:
            done = cluster.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            if done.returncode:
                raise SystemExit(f"oracle: {shlex.join(command)} failed:\n{done.stderr}")
            return str(done.stdout)

        yield run


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines with means and worst cases, and of each cluster tau and regret."""
    accuracies = sorted(row.accuracy for row in rows)
    yield f"accuracy of times: mean {mean(accuracies):.1%}, worst {accuracies[0]:.1%}"
    within = [abs(row.memory - row.resident) <= max(3, 0.05 * row.resident) for row in rows]
    worst = max(rows, key=lambda row: abs(row.memory_error))
    yield (
        f"memory: {sum(within)} of {len(rows)} within 5 % or 3 MiB, worst error "
        f"{worst.memory_error:+.1%} ({worst.network}, {worst.plan})"
    )
    rows = sorted(rows, key=lambda row: (row.layout, row.network, row.batch))
    for (layout, network, batch), group in groupby(
        rows, key=lambda row: (row.layout, row.network, row.batch)
    ):
        own = list(group)
        if len(own) > 1:
            tau = kendall([r.predicted for r in own], [r.measured for r in own])
            yield f"{layout:13}{network:11}{batch:6} tau {tau:.2f}, regret {regret(own):.1%}"


def kendall(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return Kendall's rank correlation.

    >>> kendall([1, 2, 3, 4], [1, 2, 4, 3])
    0.6666666666666666
    """
    pairs = list(combinations(range(len(xs)), 2))
    signs = [(xs[i] - xs[j]) * (ys[i] - ys[j]) for i, j in pairs]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(pairs)


def regret(rows: Sequence[Row]) -> float:
    """Return by how much the plan predicted to be the fastest is slower than the fastest one."""
    chosen = min(rows, key=lambda row: row.predicted)
    return chosen.measured / min(row.measured for row in rows) - 1


if __name__ == "__main__":
    main()
