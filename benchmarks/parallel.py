"""Networks that are cut over ranks, compared with one rank that computes the whole network.

    mpirun -np 2 python -m benchmarks.parallel                         # all cases
    mpirun -np 2 python -m benchmarks.parallel --cases spatial --steps 20 --output FILE

Steps of the same global batch take turns: one by rank 0 alone, while the other ranks sleep, and one
by all ranks, each with `--threads` threads. `wait` is the time inside communication calls and
`sent` the bytes that rank 0 sends to ranks with other parts of the network, both per step. The
targets with 2 ranks are 1.6 for `spatial`, 1.4 for `alternate` and 1.35 for the best number of
micro-batches of `pipeline`. A pipeline of S stages and M micro-batches waits for at least
(S - 1) / (M + S - 1) of a step.
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
from benchmarks.common.work import WORK, create_trainer
from pydtnn import Mesh
from pydtnn.comm import Communicator, create_communicator
from pydtnn.data import Batch
from pydtnn.data.order import own_shards
from pydtnn.kernels import create_backend
from pydtnn.training.trainer import Trainer
from pydtnn.training.tuning import autotune

WARM_UP = 3  # steps; the first one chooses algorithms


class Case(NamedTuple):
    """A network, the axis of the mesh along which it is cut, and its micro-batches, if any."""

    work: str
    axis: str
    micro_batches: int | None = None


CASES = {
    "data": Case("resnet18", "data"),
    "spatial": Case("resnet18", "spatial"),
    "alternate": Case("vgg16_bn", "alternate"),
    "filter": Case("vgg16_bn", "filter"),
    "channel": Case("vgg16_bn", "channel"),
    "pipeline-2": Case("resnet44-128", "pipeline", 2),
    "pipeline-4": Case("resnet44-128", "pipeline", 4),
    "pipeline-8": Case("resnet44-128", "pipeline", 8),
}


class Side:
    """A trainer with its batch.

    Parameters
    ----------
    work : str
    threads : int
    mesh : Mesh, optional
        The ranks that share the network; by default this one has all of it.
    micro_batches : int, optional
        Of a pipeline.
    """

    def __init__(
        self,
        work: str,
        threads: int,
        mesh: Mesh | None = None,
        micro_batches: int | None = None,
    ) -> None:
        own = WORK[work]
        backend = create_backend("cpu", threads=threads)
        options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
        self.mesh = mesh
        comm = create_communicator("serial") if mesh is None else mesh.data
        self.trainer: Trainer = create_trainer(
            own, backend, comm, micro_batches=micro_batches, **options
        )
        model = self.trainer.model
        self.trainer.exchange.start(model.buckets)
        largest = own.batch // comm.size // (micro_batches or 1)
        autotune(model, self.trainer.comm, largest, training=True)
        x, target = own.data()
        part = model.graph.inputs[0].part
        x = x if part is None else x[:, *part].copy()
        rows, shards = own_shards(own.batch, comm.size * (micro_batches or 1), comm.rank, comm.size)
        samples = np.arange(own.batch)[rows]
        self.batch = Batch(x[rows], target[rows], samples, 0, own.batch, shards)

    def step(self) -> float:
        """Make a step; return its seconds."""
        start = time.perf_counter()
        self.trainer.train_step(self.batch)
        return time.perf_counter() - start

    def waited(self) -> float:
        """Return the seconds inside communication calls so far."""
        return 0.0 if self.mesh is None else self.mesh.comm.traffic.seconds

    def sent(self) -> int:
        """Return the bytes sent so far."""
        return 0 if self.mesh is None else self.mesh.comm.traffic.bytes


def sleep_until(comm: Communicator) -> None:
    """Wait for rank 0 without using the processor."""
    word = np.zeros(1)
    if comm.rank == 0:
        for rank in range(1, comm.size):
            comm.send(word, rank)
    else:
        request = comm.irecv(word, 0)
        while not request.test():
            time.sleep(0.001)
    comm.barrier()


def measure(report: Report, comm: Communicator, name: str, threads: int, steps: int) -> None:
    """Print the row of a case."""
    case = CASES[name]
    with TemporaryDirectory() as cache, Mesh(comm, **{case.axis: comm.size}) as mesh:
        os.environ["PYDTNN_CACHE"] = cache
        alone = Side(case.work, threads) if comm.rank == 0 else None
        sleep_until(comm)
        together = Side(case.work, threads, mesh, case.micro_batches)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(WARM_UP + steps):
            if turn == WARM_UP:
                waited, sent = together.waited(), together.sent()
            single = alone.step() if alone is not None else 0.0
            sleep_until(comm)
            shared = together.step()
            if turn >= WARM_UP:
                times[0].append(single)
                times[1].append(shared)
        one, all_ = (1e3 * statistics.median(own) for own in times)
        wait = 1e3 * (together.waited() - waited) / steps
        volume = (together.sent() - sent) // steps
        report.line(
            f"{name:12}{case.work:12}{comm.size:6}{one:10.1f}{all_:10.1f}{one / all_:9.2f}"
            f"{wait:9.1f}{volume:12}"
        )


class Quiet(Report):
    """A report of another rank, which prints nothing."""

    def line(self, text: str = "") -> None:
        """Discard a line."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--threads", type=int, default=1, help="threads per rank")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output", type=Path, help="file that receives the table, too")
    args = parser.parse_args()
    comm = create_communicator()
    report = Report(args.output) if comm.rank == 0 else Quiet(None)
    report.line(
        f"{'case':12}{'work':12}{'ranks':>6}{'alone ms':>10}{'ranks ms':>10}{'speedup':>9}"
        f"{'wait ms':>9}{'sent B':>12}"
    )
    for name in args.cases:
        measure(report, comm, name, args.threads, args.steps)


if __name__ == "__main__":
    main()
