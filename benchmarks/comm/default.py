"""The default beside every choice of --allreduce and --bucket-bytes: time of a training step.

    mpirun -np 4 python -m benchmarks.comm.default --seconds 60
    python -m benchmarks.comm.cluster --table --parts default --seconds 150

All choices train ResNet-20 in one job, alternately, a few steps at a time, in another order each
time, so what disturbs the machine disturbs all of them. In the first half of the time all of them
train; in the second half only the default and those that were fastest, so that being fastest by
chance does not count. The time of a step is that of the slowest rank, the median over the turns.
The last line says how fast the default is as a share of the fastest: the time of the latter by its
own.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable
from itertools import product
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.common.work import WORK, create_several
from pydtnn.comm import Communicator
from pydtnn.comm.schedules.rule import ALLREDUCES, RULE, create_allreduce
from pydtnn.data import Batch
from pydtnn.kernels import create_backend
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.preparation import autotune
from pydtnn.training.trainer import Trainer

STEPS = 3
"""Steps of a turn: the first is not timed, as it finds the caches as another choice left them."""
FINALISTS = 6
"""Choices that go on beside the default."""
BUCKETS = (1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20)


class Choice(NamedTuple):
    """What `--allreduce` and `--bucket-bytes` say; None: nothing."""

    allreduce: str
    bucket_bytes: int | None

    def __str__(self) -> str:
        size = "" if self.bucket_bytes is None else f"{self.bucket_bytes >> 10} KiB"
        return f"{self.allreduce:20} {size:>9}"


DEFAULT = Choice("default", None)


class Contest:
    """Trainers of the same net and batch that differ in how gradients are exchanged.

    Parameters
    ----------
    comm : Communicator
    choices : iterable of Choice
    batch : int
        Samples of a rank.
    """

    def __init__(self, comm: Communicator, choices: Iterable[Choice], batch: int) -> None:
        self.comm = comm
        work = WORK["resnet20"]._replace(batch=batch)
        x, target = work.data()
        self.batch = Batch(x, target, np.arange(batch), 0, batch * comm.size)
        self.backend = create_backend("cpu", threads=1, tuning="fixed")
        self.sums: dict[str, Communicator] = {}
        self.models: dict[int | None, Model] = {}
        self.trainers = {choice: self._trainer(choice, work) for choice in choices}
        self.times: dict[Choice, list[float]] = {}

    def _trainer(self, choice: Choice, work: tuple) -> Trainer:
        name = RULE if choice == DEFAULT else choice.allreduce
        if name not in self.sums:
            self.sums[name] = create_allreduce(name, self.comm)
        if choice.bucket_bytes not in self.models:
            options = {} if choice == DEFAULT else {"bucket_bytes": choice.bucket_bytes}
            net = create_net(work.net, work.classes, work.shape)
            self.models[choice.bucket_bytes] = Model(
                net, work.shape, backend=self.backend, **options
            )
        trainer = Trainer(
            self.models[choice.bucket_bytes],
            SGD(1e-4, momentum=0.9),
            metrics=(),
            exchange=AllReduce(self.sums[name]),
        )
        trainer.exchange.start(trainer.model.buckets)
        autotune(trainer.model, trainer.comm, work.batch, training=True)
        return trainer

    def run(self, choices: list[Choice], seconds: float, seed: int) -> dict[Choice, float]:
        """Alternate some for so long; return the time of a step of each, in s."""
        self.times = {choice: [] for choice in choices}
        end, turn = time.perf_counter() + seconds, 0
        while turn == 0 or self._agree(time.perf_counter() < end):
            order = list(choices)
            random.Random(f"{seed} {turn}").shuffle(order)
            for choice in order:
                self.times[choice].append(self._turn(self.trainers[choice]))
            turn += 1
        slowest = {choice: np.array(times) for choice, times in self.times.items()}
        for times in slowest.values():
            self.comm.allreduce(times, "max")
        return {choice: median(times.tolist()) for choice, times in slowest.items()}

    def _turn(self, trainer: Trainer) -> float:
        trainer.train_step(self.batch)
        self.comm.barrier()
        start = time.perf_counter()
        for _ in range(STEPS - 1):
            trainer.train_step(self.batch)
        return (time.perf_counter() - start) / (STEPS - 1)

    def _agree(self, going_on: bool) -> bool:
        """Whether rank 0 goes on."""
        word = np.array([going_on], np.uint8)
        self.comm.broadcast(word)
        return bool(word[0])


def main() -> None:
    """Print the time of every choice, and how fast the default is beside the fastest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60, help="in all, without the start")
    parser.add_argument("--batch", type=int, default=16, help="samples of a rank")
    parser.add_argument("--allreduce", nargs="+", choices=[*ALLREDUCES], default=[*ALLREDUCES][1:])
    parser.add_argument("--bucket-bytes", nargs="+", type=int, default=BUCKETS)
    args = parser.parse_args()
    comm = create_allreduce("vendor", create_several(parser))
    choices = [Choice(*pair) for pair in product(args.allreduce, args.bucket_bytes)]
    contest = Contest(comm, [DEFAULT, *choices], args.batch)
    say: Callable[..., None] = print if comm.rank == 0 else lambda *words, **options: None
    first = contest.run([DEFAULT, *choices], args.seconds / 2, seed=0)
    say(f"{'allreduce':20} {'buckets':>9} {'ms/step':>9} {'turns':>6}")
    table(say, contest, first)
    finalists = sorted(choices, key=lambda choice: first[choice])[:FINALISTS]
    last = contest.run([DEFAULT, *finalists], args.seconds / 2, seed=1)
    say("the default and the fastest, again:")
    table(say, contest, last)
    best = min(finalists, key=lambda choice: last[choice])
    buckets = contest.trainers[DEFAULT].model.buckets
    share, name = last[best] / last[DEFAULT], " ".join(str(best).split())
    say(f"default, {len(buckets)} buckets: {share:.3f} of the speed of {name}")


def table(say: Callable[..., None], contest: Contest, times: dict[Choice, float]) -> None:
    """A row for each choice, the fastest first."""
    for choice in sorted(times, key=lambda choice: times[choice]):
        say(f"{choice} {1e3 * times[choice]:9.2f} {len(contest.times[choice]):6}", flush=True)


if __name__ == "__main__":
    main()
