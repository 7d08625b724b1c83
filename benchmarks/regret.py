"""Time of every strategy of a job, predicted and measured, and the regret of the predicted choice.

    mpirun -np 4 python -m benchmarks.regret --model resnet20 --shape 32,32,3 --batch 64
    python -m benchmarks.regret --cluster "1gbit 4x1" --model vgg11 --shape 32,32,3 --batch 64

All strategies that `--parallel auto` considers are predicted as it does, with the compute of all
ranks (or by formulas: `--formulas`, `--platform`), and run: uniform ones, hybrids, and plans that
were searched layer by layer. Each is measured in several turns, one after the other, so that other
work on the machine disturbs all of them; the time of a step is the median of the slowest rank's.
On a busy machine, as `python -m pydtnn.train` recognises it, a strategy has no prediction, if that
shows while its compute is measured, or no accuracy, if its steps differ too much, and is left out
of what follows. The regret is the measured time of the strategy that is predicted to be the fastest
over that of the fastest one, minus 1; tau is Kendall's rank correlation of predicted and measured
times.

`--cluster` runs it on four ranks of an emulated cluster: `benchmarks.comm.cluster`, for root.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from benchmarks.common.report import Report
from benchmarks.oracle import kendall, on
from pydtnn.cli.step_meter import BUSY, MAX_SPREAD
from pydtnn.comm import Communicator, agree, create_communicator
from pydtnn.comm.agree import on_rank_0
from pydtnn.comm.cores import threads_per_rank
from pydtnn.kernels import create_backend
from pydtnn.tools.perfmodel.choice import label, milliseconds
from pydtnn.tools.perfmodel.compute.analytic import AnalyticCosts
from pydtnn.tools.perfmodel.job import platform_of, predict_job
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.perfmodel.search import search
from pydtnn.tools.perfmodel.workload_rank import WorkloadRank
from pydtnn.training.workload import Workload
from pydtnn.utils import clock
from pydtnn.utils.units import parse_shape

WARM_UP = 2


class Case(NamedTuple):
    """A strategy with its predicted time, in s, or the reason why there is none."""

    name: str
    work: Workload
    predicted: float
    reason: str = ""


class Outcome(NamedTuple):
    """A case with its measured time, in s."""

    case: Case
    measured: float


def main() -> None:
    """Print the table."""
    args = _parser().parse_args()
    if args.cluster:
        own = [word for word in sys.argv[1:] if word not in ("--cluster", args.cluster)]
        with on(args.cluster) as run:
            print(run(4, ["python", "-m", "benchmarks.regret", *own]), end="")
        return
    comm = create_communicator()
    outcomes = measure_all(comm, find_cases(comm, args), args)
    if comm.rank == 0:
        report = Report(args.output)
        for line in table(outcomes):
            report.line(line)


def find_cases(comm: Communicator, args: argparse.Namespace) -> list[Case]:
    """Return the strategies of the job, the fastest first. Collective: all ranks call it."""
    work = Workload(args.model, parse_shape("--shape", args.shape), args.classes, args.batch)
    threads = threads_per_rank(comm)
    platform = args.platform and Platform.load(args.platform)
    if platform is None:
        platform = platform_of(comm, create_backend("cpu", threads=threads), work)

    def find() -> list[tuple[str, Workload, float]]:
        projector = Projector(work, platform, AnalyticCosts.of(work, platform))
        found = search(projector, comm.size)
        return [(label(one), one.work, one.seconds) for one in found.tried[: args.most]]

    cases = [Case(*one) for one in comm.gather_object(on_rank_0(comm, find))[0]]
    if args.platform or args.formulas:
        return cases
    measured = []
    for case in cases:
        work = replace(case.work, threads=threads).in_micro_batches()
        try:
            one = predict_job(comm, work, platform)
        except ValueError as error:  # on all ranks: the machine is busy
            measured.append(case._replace(reason=f"not predicted: {error}"))
            continue
        seconds = comm.gather_object(None if one is None else one.seconds)[0]
        measured.append(case._replace(predicted=seconds))
    return measured


def measure_all(
    comm: Communicator, cases: Sequence[Case], args: argparse.Namespace
) -> list[Outcome]:
    """Measure all cases alternately. Collective: all ranks call it."""
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(args.turns):
        for case, own in zip(cases, times, strict=True):
            own += measure(comm, case.work, args)
    return [outcome(case, own) for case, own in zip(cases, times, strict=True)]


def outcome(case: Case, steps: Sequence[float]) -> Outcome:
    """Return the time of the steps, in s, unless they differ too much to be compared."""
    low, middle, high = quantiles(steps, n=4, method="inclusive")
    spread = (high - low) / 2 / middle
    if spread > MAX_SPREAD and not case.reason:
        case = case._replace(reason=f"not compared: {BUSY.format(spread)}")
    return Outcome(case, middle)


def measure(comm: Communicator, work: Workload, args: argparse.Namespace) -> list[float]:
    """Return the times of steps of the slowest rank, in s. Collective: all ranks call it."""
    work = replace(work, threads=threads_per_rank(comm)).in_micro_batches()
    rank, error = None, None
    try:
        rank = WorkloadRank(work, comm)
    except ValueError as problem:
        error = problem
    agree(comm, error)
    assert rank is not None
    for _ in range(WARM_UP):
        rank.step()
    comm.barrier()
    ends = [clock.now()]
    for _ in range(max(args.steps, 2)):
        rank.step()
        ends.append(clock.now())
    taken = [end - begin for begin, end in pairwise(ends)]
    return [max(own) for own in zip(*comm.gather_object(taken), strict=True)]


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of the table, with regret and tau."""
    width = max(len(one.case.name) for one in outcomes)
    lines = [f"{'strategy':{width}}  predicted ms  measured ms  accuracy"]
    for one in outcomes:
        if one.case.reason:
            measured = milliseconds(one.measured)
            lines.append(f"{one.case.name:{width}}  {'-':>12}  {measured:>11}  {one.case.reason}")
            continue
        accuracy = 1 - abs(one.case.predicted - one.measured) / one.measured
        lines.append(
            f"{one.case.name:{width}}  {milliseconds(one.case.predicted):>12}"
            f"  {milliseconds(one.measured):>11}  {accuracy:>7.0%}"
        )
    outcomes = [one for one in outcomes if not one.case.reason]
    if not outcomes:
        return [*lines, "no strategy is compared: repeat this when the machine is idle"]
    fastest = min(outcomes, key=lambda one: one.measured)
    chosen = min(outcomes, key=lambda one: one.case.predicted)
    lines.append(f"chosen: {chosen.case.name}; fastest: {fastest.case.name}")
    lines.append(f"regret {chosen.measured / fastest.measured - 1:.1%}")
    if len(outcomes) > 1:
        tau = kendall([o.case.predicted for o in outcomes], [o.measured for o in outcomes])
        lines[-1] += f", tau {tau:.2f}"
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--shape", "--input", default="32,32,3", metavar="H,W,C")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks per step")
    parser.add_argument("--platform", metavar="FILE", help="by default measured")
    parser.add_argument("--formulas", action="store_true", help="predict without measured compute")
    parser.add_argument("--most", type=int, default=12, help="strategies, the fastest first")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--cluster", default="", metavar="LAYOUT", help="such as '1gbit 4x1'")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    return parser


if __name__ == "__main__":
    main()
