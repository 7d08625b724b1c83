"""Throughput with a slow rank, with parts of equal size and with those of `Balance`.

    mpirun -np 4 python -m benchmarks.comm.balance
    mpirun -np 4 python -m benchmarks.comm.balance --factor 4 --epochs 6

Method. Ranks train a small network with a layer that waits for a time per sample, on the last rank
`--factor` times as long, so that ranks have known speeds on any machine. The ideal throughput is
the sum of the speeds of all ranks: every rank is busy all the time, and everything but the layer
takes no time. The table shows that of each epoch, from the times of its steps; parts of equal size
are those of the first epoch. The target is 0.9 of the ideal.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from benchmarks.common.work import create_several
from pydtnn.callbacks import Balance, Callback, SlowRanks
from pydtnn.data import ArrayDataset
from pydtnn.layers import Linear, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.parallel import AllReduce
from pydtnn.training import Trainer


class Delayed(ReLU):
    """A layer that takes a time per sample, in s."""

    seconds = 0.0

    def forward(self, x: Any, *, context: Any) -> Any:
        """Wait, and compute."""
        time.sleep(self.seconds * len(x))
        return super().forward(x, context=context)


class Epochs(Callback):
    """The seconds of the steps of each epoch, and the parts of the ranks in it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.shares: list[Any] = []

    def on_epoch_start(self, trainer: Any) -> None:
        """Begin to measure."""
        self.shares.append(trainer.shares)
        self._before = trainer.seconds["steps"] + trainer.seconds["data"]

    def on_epoch_end(self, trainer: Any) -> None:
        """Store the time."""
        now = trainer.seconds["steps"] + trainer.seconds["data"]
        self.seconds.append(now - self._before)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--factor", type=float, default=2.0, help="of the last rank's time")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of an epoch")
    parser.add_argument("--batch", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--delay", type=float, default=1e-3, help="of a sample, in s")
    args = parser.parse_args()
    comm = create_several(parser)
    batch = args.batch * comm.size
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch * args.steps, 16)).astype("f4")
    data = ArrayDataset(x, rng.integers(0, 4, len(x)), classes=4)
    layer = Delayed()
    layer.seconds = args.delay * (args.factor if comm.rank == comm.size - 1 else 1)
    slow, epochs = SlowRanks(1e9), Epochs()
    trainer = Trainer(
        Model(Sequential(Linear(16), layer, Linear(4)), (16,)),
        SGD(0.05),
        exchange=AllReduce(comm),
        callbacks=[epochs, slow, Balance(slow)],
        observers=[slow.times],
        progress=False,
    )
    trainer.fit(data, epochs=args.epochs, global_batch_size=batch)
    seconds = np.max(comm.gather_object(epochs.seconds), axis=0)
    if comm.rank == 0:
        ideal = (comm.size - 1 + 1 / args.factor) / args.delay
        print(f"{comm.size} ranks, the last of 1/{args.factor:g} of the speed; ideal {ideal:.0f}/s")
        print(f"{'epoch':>5}{'samples/s':>11}{'of ideal':>10}  samples of the ranks")
        for number, (one, shares) in enumerate(zip(seconds, epochs.shares, strict=True), 1):
            rate = len(data) / one
            parts = ", ".join(map(str, shares or [args.batch] * comm.size))
            print(f"{number:5}{rate:11.0f}{rate / ideal:10.3f}  {parts}")


if __name__ == "__main__":
    main()
