"""Ranks that compute longer than the others are named once per epoch, with the part."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.callbacks import SlowRanks
from pydtnn.callbacks.slow_ranks import slow_ranks
from pydtnn.comm import Communicator, run_threads
from pydtnn.layers import Linear, Sequential
from pydtnn.optimizers import SGD
from pydtnn.parallel import AllReduce
from pydtnn.utils import clock
from tests.each import each
from tests.small_training import Ticks, spend


class Slow(ArrayDataset):
    """Data that take a second to read."""

    def read(self, indices: Any) -> Any:
        spend(1)
        return super().read(indices)


class SlowLinear(Linear):
    """A layer whose forward pass takes some seconds."""

    seconds = 0.25

    def forward(self, x: Any, *, context: Any) -> Any:
        spend(self.seconds)
        return super().forward(x, context=context)


def train(comm: Communicator, where: str) -> None:
    x, y = np.zeros((24, 4), "float32"), np.zeros(24, "int64")
    late = comm.rank == 1
    data = (Slow if late and where == "data" else ArrayDataset)(x, y, classes=2)
    layer, slow = SlowLinear(2), SlowRanks(least=0.05)
    layer.seconds = 1 if late and where == "steps" else 0.25
    own: Any = {"callbacks": [slow], "progress": False}
    model = Model(Sequential(layer), (4,))
    with clock.used(Ticks()):
        trainer = Trainer(model, SGD(0.1), exchange=AllReduce(comm), **own)
        trainer.fit(data, epochs=2, batch_size=2, loader_threads=0)


@each("where", ["data", "steps"])
def test_a_slow_rank_is_named_once_per_epoch_with_its_part(where, caplog):
    with caplog.at_level(logging.WARNING, "pydtnn.train"):
        run_threads(3, train, where)
    for epoch in (1, 2):
        told = [text for text in caplog.messages if text.startswith(f"epoch {epoch}: rank ")]
        assert len(told) == 1
        assert told[0].startswith(f"epoch {epoch}: rank 1 ")
        assert f"mostly in {where}: " in told[0]


def test_ranks_that_are_alike_or_differ_for_a_moment_are_not_named():
    alike = [{"forward": 1.0, "backward": 2.0}, {"forward": 1.3, "backward": 2.1}] * 2
    for times in (alike, alike[:1], [{}, {}]):
        assert slow_ranks(times, 1.5) == []
    times = [{"forward": 0.1}, {"forward": 0.3}]
    assert slow_ranks(times, 1.5, least=0.1)
    assert slow_ranks(times, 1.5, least=1.0) == []


def test_the_part_is_the_one_with_the_largest_difference():
    times = [{"forward": 1.0, "backward": 5.0}, {"forward": 5.0, "backward": 6.0}]
    (told,) = slow_ranks([times[0], times[1], times[0]], 1.5)
    assert told.startswith("rank 1 is busy 1.8 times as long as the others, mostly in forward")
