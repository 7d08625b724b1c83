"""The ranks of `benchmarks.oracle`: workloads are predicted, and measured alternately.

Started by `benchmarks.oracle` on as many ranks as the workloads have. Rank 0 prints one line of
JSON per workload. All ranks measure their compute at the same time (`measure_job`); then rank 0
predicts, while the others wait without using their core; then all of them train.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.cases import workload_of
from benchmarks.common.work import resident, rest
from pydtnn.comm import Communicator, create_communicator
from pydtnn.tools.perfmodel.compute.measured import measure_job
from pydtnn.tools.perfmodel.compute.profile import MeasuredCosts
from pydtnn.tools.perfmodel.job import platform_of
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.prediction import RankPrediction
from pydtnn.tools.perfmodel.virtual import Processor, SharedCores
from pydtnn.tools.perfmodel.virtual.steps import STEPS, simulate
from pydtnn.tools.perfmodel.workload_rank import WorkloadRank, period
from pydtnn.training.preparation import autotune
from pydtnn.training.workload import Workload
from pydtnn.utils.machine import restart_peak

WARM_UP = 3
"""Steps before those that are measured."""

MAX_TURN_S = 3.0
"""Time of a turn in s above which it has fewer steps, and of a step above which there are fewer
turns."""

MIN_STEPS_AND_TURNS = 2
"""Steps of such a turn, and number of such turns."""

MIB = 1 << 20


def seconds_of(rank: WorkloadRank, comm: Communicator, steps: int) -> list[float]:
    """Train; return the seconds of each period of steps, per step."""
    found = []
    comm.barrier()
    before = time.perf_counter()
    for _ in range(steps):
        rank.step()
        now = time.perf_counter()
        found.append(now - before)
        before = now
    return found


def predict(
    workload: Workload,
    comm: Communicator,
    platform: Platform,
    steps: int,
    cores: SharedCores | None,
) -> list[RankPrediction]:
    """Measure the compute of all ranks and predict their steps, on rank 0; nothing on others."""
    profile = measure_job(workload, comm, steps=steps, warm_up=1, shared=cores is not None)
    if comm.rank:
        return []
    costs = [MeasuredCosts(own, varying=True) for own in profile.typical(STEPS).ranks]
    network, processor = platform.network(comm.size), Processor.of(platform)
    return simulate(workload, network, costs, processor, cores=cores)


def compare(
    workload: Workload, comm: Communicator, platform: Platform, turns: int, steps: int
) -> dict[str, Any]:
    """Predict and measure a workload; return the result, complete on rank 0."""
    restart_peak()
    before = resident()
    rank = WorkloadRank(workload, comm)
    autotune(rank.trainer.model, comm, rank.largest, training=True)
    restart_peak()  # that of tuning, which is not in a step
    length = period(workload)
    warm_up = seconds_of(rank, comm, length * -(-WARM_UP // length))
    step = max(comm.gather_object(statistics.median(warm_up)))
    steps = length * -(-max(min(steps, int(MAX_TURN_S / step)), MIN_STEPS_AND_TURNS) // length)
    turns = min(turns, MIN_STEPS_AND_TURNS) if step > MAX_TURN_S else turns
    grown = max(comm.gather_object(resident(peak=True) - before))
    predicted, measured, communicated, memory = [], [], [], 0.0
    number = len(os.sched_getaffinity(0))  # all hosts of an emulated cluster are this machine
    kept = platform.messages.wake is None
    cores = SharedCores(number, (0,) * comm.size, kept) if number < comm.size else None
    for _ in range(turns):
        if ranks := predict(workload, comm, platform, steps, cores):
            predicted.append(max(one.step.seconds for one in ranks))
            communicated.append(ranks[0].step.exposed)
            memory = max(one.memory.total for one in ranks) / MIB
        rest(comm)
        seconds_of(rank, comm, 1 if length == 1 else length)
        times = seconds_of(rank, comm, steps)
        periods = np.add.reduceat(times, range(0, steps, length)) / length
        measured.append(statistics.median(periods.tolist()))
    found = {"measured": measured, "predicted": predicted, "communication": communicated}
    return found | {"memory": memory, "resident": grown}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the workloads that are listed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("cases", nargs="+", help="as workload_of takes them")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    comm = create_communicator()
    for case in args.cases:
        workload = workload_of(case)
        platform = platform_of(comm, workload.create_backend(), workload, rates=False)
        found = compare(workload, comm, platform, args.turns, args.steps)
        if comm.rank == 0:
            print(json.dumps({"case": case, "name": workload.name} | found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
