"""Training from the same weights with the same batches, on MPI ranks and by PyTorch.

    mpirun -np 2 python -m benchmarks.cpu.same_training --minutes 10
    mpirun -np 2 python -m benchmarks.cpu.same_training --model mobilenet_v2 --dataset cifar10 \
        --data-dir DATA --optimizer sgd --lr 0.1 --batch 128 --epochs 10

First the ranks train for some minutes or epochs, then one process does as many steps with PyTorch's
twin of the network, on all cores. Then the ranks repeat their first steps, which must give the same
bytes of weights. Lines are the mean losses of a tenth of the steps, and how far ours is from
theirs; the last one is the accuracy of both on a part of the test set (of tokens: of the next one).
Rates are constant; one that is too high makes both sides chaotic, so that they differ after some 30
steps (0.001 for the GPT, which has no warm-up here). There is neither weight decay nor
augmentation. Networks with dropout need `--model-options '{"dropout": 0}'`: its masks are not those
of PyTorch. `--dtype float64` shows whether a difference is one of rounding. MobileNet v2 on images
of 32 x 32 normalises maps of one pixel and multiplies differences by about 300 in a step: losses
with a rate of 0.005 are equal to four digits for one step in float32 and for eight in float64.
Batch norm has the statistics of all ranks, as PyTorch's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import WITH_TORCH, Report
from benchmarks.common.work import rest
from pydtnn.comm import Communicator, create_communicator
from pydtnn.data import Dataset, Loader, load_dataset
from pydtnn.kernels import create_backend
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import get_optimizer
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.trainer import Trainer
from pydtnn.utils.machine import default_threads

REPEATED = 10
"""Steps that are repeated."""

PARTS = 10
"""Lines of the table."""


class Task:
    """What both sides train.

    Parameters
    ----------
    given : argparse.Namespace
    train, test : Dataset
    """

    def __init__(self, given: argparse.Namespace, train: Dataset, test: Dataset) -> None:
        self.given, self.train, self.test = given, train, test
        self.momentum = {"momentum": 0.9} if given.optimizer == "sgd" else {}

    def model(self) -> Model:
        """Make the network with its initial weights."""
        classes = self.train.classes or 1
        net = create_net(self.given.model, classes, self.train.input_shape, **self.given.options)
        backend = create_backend("cpu", threads=default_threads(), tuning="fixed")
        model = Model(net, self.train.input_shape, backend=backend, seed=0, dtype=self.given.dtype)
        for p in model.parameters.values():  # the twin copies float32
            p.master[...] = p.master.astype("float32")
        return model

    def batches(self, rank: int, size: int) -> Any:
        """Yield the batches of a rank, for ever."""
        for epoch in count():
            with Loader(
                self.train, global_batch_size=self.given.batch, rank=rank, size=size, seed=0
            ) as loader:
                for batch in loader.epoch(epoch):
                    x = batch.x
                    if x.dtype.kind == "f":
                        x = x.astype(self.given.dtype, copy=False)
                    yield replace(batch, x=x), epoch

    def steps(self) -> int | None:
        """Return the steps of the epochs that are asked for, if any."""
        per_epoch = -(-len(self.train) // self.given.batch)
        return self.given.epochs * per_epoch if self.given.epochs else None


def ours(task: Task, comm: Communicator, limit: int | None) -> tuple[Trainer, list[float]]:
    """Train on all ranks for a number of steps, or the minutes; return the losses."""
    optimizer = get_optimizer(
        task.given.optimizer, lr=task.given.lr, weight_decay=0.0, **task.momentum
    )
    model = task.model()
    trainer = Trainer(
        model,
        optimizer,
        metrics=(),
        exchange=AllReduce(comm),
        progress=False,
        sync_batch_norm=comm.size > 1,
    )
    trainer.exchange.start(model.buckets)
    losses: list[float] = []
    begin = time.perf_counter()
    for batch, epoch in task.batches(comm.rank, comm.size):
        losses.append(trainer.train_step(batch, epoch).means()["loss"])
        over = time.perf_counter() - begin > 60 * task.given.minutes
        if len(losses) == limit or (limit is None and comm.gather_object(over)[0]):
            return trainer, losses
    raise AssertionError("batches do not end")


def theirs(task: Task, weights: Model, steps: int) -> tuple[Any, list[float]]:
    """Train PyTorch's twin with the same weights; return the losses."""
    import torch

    from benchmarks.common.torch_twin import Twin, to_torch

    twin = Twin(weights).to(getattr(torch, task.given.dtype))
    rates = {"lr": task.given.lr, **task.momentum}
    kind = torch.optim.SGD if task.given.optimizer == "sgd" else torch.optim.AdamW
    optimizer = kind(twin.parameters(), weight_decay=0.0, **rates)
    losses: list[float] = []
    for (batch, _), _ in zip(task.batches(0, 1), range(steps), strict=False):
        x, y = to_torch(batch.x), torch.from_numpy(batch.y).long()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(twin(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return twin.eval(), losses


def digest(model: Model) -> str:
    """Return a hash of all parameters and statistics."""
    return hashlib.sha256(b"".join(a.tobytes() for a in model.state().values())).hexdigest()


def accuracy(task: Task, predict: Any) -> float:
    """Return the share of test samples, or of their positions, with the right class."""
    right = []
    for start in range(0, min(len(task.test), task.given.test), task.given.batch):
        x, y = task.test.read(np.arange(start, min(start + task.given.batch, len(task.test))))
        right.append((predict(task.test.normalize(x)).argmax(-1) == y).mean())
    return float(np.mean(right))


def main() -> None:
    """Train, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--model-options", dest="options", type=json.loads, default={})
    parser.add_argument("--dataset", default="text")
    parser.add_argument("--data-dir")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="adamw")
    parser.add_argument("--lr", type=float, default=0.0003)
    parser.add_argument("--batch", type=int, default=8, help="samples of all ranks")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--epochs", type=int, help="instead of minutes")
    parser.add_argument("--train", type=int, help="samples of the training set, the first ones")
    parser.add_argument("--test", type=int, default=2000, help="samples of the test set")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    comm = create_communicator()
    if not WITH_TORCH:
        sys.exit("same_training: PyTorch is not installed; run `make parity`")
    where = {"data_dir": given.data_dir} if given.data_dir else {}
    train, test = load_dataset(given.dataset, **where)
    task = Task(given, train.subset(range(given.train)) if given.train else train, test)
    first, losses = ours(task, comm, task.steps())
    again = [digest(ours(task, comm, REPEATED)[0].model) for _ in range(2)]
    if comm.rank == 0:
        report = Report(given.output)
        compare(report, task, first, losses, again)
    rest(comm)


def compare(
    report: Report, task: Task, trainer: Trainer, losses: list[float], again: list[str]
) -> None:
    """Train the twin on rank 0, and print both sides."""
    import torch

    from benchmarks.common.torch_twin import to_ours, to_torch

    torch.set_num_threads(2)
    plain = Model(
        create_net(
            task.given.model, task.train.classes or 1, task.train.input_shape, **task.given.options
        ),
        task.train.input_shape,
        seed=0,
        fuse=False,
    )
    twin, others = theirs(task, plain, len(losses))
    ranks = trainer.comm.size
    report.line(f"{task.given.model} on {task.given.dataset}: {len(losses)} steps, {ranks} ranks")
    report.line(
        f"the first {REPEATED} steps, twice: " + ("same" if len({*again}) == 1 else "OTHER")
    )
    report.line(f"{'steps':>13} {'ours':>9} {'PyTorch':>9} {'difference':>11}")
    for own in np.array_split(np.arange(len(losses)), PARTS):
        a, b = np.mean(np.take(losses, own)), np.mean(np.take(others, own))
        report.line(f"{own[0]:6}-{own[-1]:6} {a:9.4f} {b:9.4f} {(a - b) / b:+11.2%}")

    def predict(x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return to_ours(twin(to_torch(x.astype(task.given.dtype))))

    mine, other = accuracy(task, trainer.model.predict), accuracy(task, predict)
    report.line(f"accuracy on the test set: ours {mine:.4f}, PyTorch {other:.4f}")


if __name__ == "__main__":
    main()
