"""Networks that are cut over ranks, compared with one rank that computes the whole network.

    mpirun -np 2 python -m benchmarks.parallel                         # all cases
    mpirun -np 2 python -m benchmarks.parallel --cases spatial --turns 10 --output FILE

Steps of the same global batch alternate: some by rank 0 alone, while the other ranks sleep, and
some by all ranks, each with `--threads` threads; the times are medians over the turns. `wait` is
the time inside communication calls and `sent` the bytes that rank 0 sends to ranks with other parts
of the network, both per step. The targets with 2 ranks are 1.6 for `spatial`, `gpt-tensor` and
`gpt-context`, 1.4 for `alternate` and 1.35 for the best number of micro-batches of `pipeline`.

A second line of a pipeline of S stages and M micro-batches shows why it is not S times as fast:
the `bubble`, the part of a step in which a stage waits if all stages take equally long, and the
halves of backward as long as forward; the time of the longest stage over the mean (`imbalance`);
and the time of rank 0 alone with the batch in M parts over that of the whole batch (`parts`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.report import Report
from benchmarks.common.work import WORK, Work, create_several, create_trainer, rest
from pydtnn import Mesh
from pydtnn.comm import Communicator, create_communicator
from pydtnn.data import Batch
from pydtnn.data.order import assign_shards
from pydtnn.kernels import create_backend
from pydtnn.model.pipeline import check
from pydtnn.training.preparation import autotune
from pydtnn.training.trainer import Trainer

STEPS = 4  # of a turn; the first turn chooses algorithms and is not counted


class Case(NamedTuple):
    """A network, the axis along which it is cut, and its micro-batches, plan and schedule."""

    work: str
    axis: str
    micro_batches: int | None = None
    plan: dict[str, dict[str, str]] | None = None
    schedule: str = "1f1b"


GPT = Work("gpt", (128,), 256, 16, {"width": 256, "heads": 4, "tied": False})
"""A GPT that can be cut between any layers."""

LATE_FILTERS = {
    "stage4": {"alternate": "model"},
    "head": {"alternate": "model"},
    "*": {"spatial": "model"},
}
"""Stripes where maps are large, filters and channels where there are many parameters."""

CASES = {
    "data": Case("resnet18", "data"),
    "spatial": Case("resnet18", "spatial"),
    "spatial-late": Case("resnet18", "model", plan=LATE_FILTERS),
    "alternate": Case("vgg16_bn", "alternate"),
    "filter": Case("vgg16_bn", "filter"),
    "channel": Case("vgg16_bn", "channel"),
    "pipeline-2": Case("resnet44-128", "pipeline", 2),
    "pipeline-4": Case("resnet44-128", "pipeline", 4),
    "pipeline-8": Case("resnet44-128", "pipeline", 8),
    "eager-4": Case("resnet44-128", "pipeline", 4, schedule="eager_1f1b"),
    "eager-8": Case("resnet44-128", "pipeline", 8, schedule="eager_1f1b"),
    "gpt-1f1b-8": Case("gpt-256", "pipeline", 8),
    "gpt-zb_h1-8": Case("gpt-256", "pipeline", 8, schedule="zb_h1"),
    "gpt-interleaved-8": Case("gpt-256", "pipeline", 8, schedule="interleaved"),
    "gpt-zb_v-8": Case("gpt-256", "pipeline", 8, schedule="zb_v"),
    "gpt-tensor": Case("gpt-256", "tensor"),
    "gpt-context": Case("gpt-256", "context"),
}


class Side:
    """A trainer with its batch.

    Parameters
    ----------
    work : str
    threads : int
    mesh : Mesh, optional
        The ranks that share the network; by default this one has all of it.
    accumulation : int
        Parts of the batch, one after another.
    """

    def __init__(
        self, case: Case, threads: int, mesh: Mesh | None = None, accumulation: int = 1
    ) -> None:
        own = (WORK | {"gpt-256": GPT})[case.work]
        micro_batches = None if mesh is None else case.micro_batches
        backend = create_backend("cpu", threads=threads)
        options: dict[str, Any] = {} if mesh is None else {"mesh": mesh, "plan": case.plan}
        self.mesh = mesh
        comm = create_communicator("serial") if mesh is None else mesh.data
        self.trainer: Trainer = create_trainer(
            own, backend, comm, micro_batches, case.schedule, **options
        )
        self.trainer.accumulation = max(self.trainer.accumulation, accumulation)
        model = self.trainer.model
        self.trainer.exchange.start(model.buckets)
        parts = micro_batches or accumulation
        largest = own.batch // comm.size // parts
        autotune(model, self.trainer.comm, largest, training=True)
        x, target = own.data()
        part = model.graph.inputs[0].part
        x = x if part is None else x[:, *part].copy()
        rows, shards = assign_shards(own.batch, comm.size * parts, comm.rank, comm.size)
        samples = np.arange(own.batch)[rows]
        self.batch = Batch(x[rows], target[rows], samples, 0, own.batch, shards)

    def steps(self, number: int) -> float:
        """Make steps; return the seconds per step."""
        start = time.perf_counter()
        for _ in range(number):
            self.trainer.train_step(self.batch)
        return (time.perf_counter() - start) / number

    def waited(self) -> float:
        """Return the seconds inside communication calls so far."""
        return 0.0 if self.mesh is None else self.mesh.comm.traffic.seconds

    def sent(self) -> int:
        """Return the bytes sent so far."""
        return 0 if self.mesh is None else self.mesh.comm.traffic.bytes


def measure(report: Report | None, comm: Communicator, name: str, threads: int, turns: int) -> None:
    """Print the row of a case."""
    case = CASES[name]
    with TemporaryDirectory() as cache, Mesh(comm, **{case.axis: comm.size}) as mesh:
        os.environ["PYDTNN_CACHE"] = cache
        sides = [Side(case, threads)] if comm.rank == 0 else []
        if sides and case.micro_batches:
            sides.append(Side(case, threads, accumulation=case.micro_batches))
        rest(comm)
        together = Side(case, threads, mesh)
        times: list[list[float]] = []
        for turn in range(1 + turns):
            if turn == 1:
                waited, sent = together.waited(), together.sent()
            alone = [side.steps(STEPS) for side in sides]
            rest(comm)
            times.append([together.steps(STEPS), *alone])
        all_, *single = (1e3 * statistics.median(own) for own in zip(*times[1:], strict=True))
        steps = turns * STEPS
        wait = 1e3 * (together.waited() - waited) / steps
        volume = (together.sent() - sent) // steps
        stages = comm.gather_object(all_ - wait)
        if report:
            report.line(
                f"{name:14}{case.work:14}{comm.size:6}{single[0]:10.1f}{all_:10.1f}"
                f"{single[0] / all_:9.2f}{wait:9.1f}{volume:12}"
            )
        if report and case.micro_batches:
            bubble = check(case.schedule, comm.size, case.micro_batches).bubble
            imbalance, parts = max(stages) / statistics.mean(stages), single[1] / single[0]
            report.line(f"{'':14}bubble {bubble:.0%}, imbalance {imbalance:.2f}, parts {parts:.2f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--threads", type=int, default=1, help="threads per rank")
    parser.add_argument("--turns", type=int, default=7, help=f"of {STEPS} steps each")
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    comm = create_several(parser)
    report = Report(args.output) if comm.rank == 0 else None
    if report:
        report.line(
            f"{'case':14}{'work':14}{'ranks':>6}{'alone ms':>10}{'ranks ms':>10}{'speedup':>9}"
            f"{'wait ms':>9}{'sent B':>12}"
        )
    for name in args.cases:
        measure(report, comm, name, args.threads, args.turns)


if __name__ == "__main__":
    main()
