"""Ranks that compute longer than the others are named once per epoch, with the phase."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback, SlowRanks
from pydtnn.callbacks.slow_ranks import PhaseTimes, slow_ranks
from pydtnn.comm import Communicator, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.layers import Linear, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD
from pydtnn.parallel import AllReduce
from pydtnn.training import Trainer
from pydtnn.utils.observer import Kind
from tests.each import each


class Slow(ArrayDataset):
    """Data that take a while to read."""

    def read(self, indices: Any) -> Any:
        time.sleep(0.03)
        return super().read(indices)


class SlowLinear(Linear):
    """A layer whose forward pass takes a while if it is `late`."""

    late = False

    def forward(self, x: Any, *, context: Any) -> Any:
        time.sleep(0.03 * self.late)
        return super().forward(x, context=context)


class Late(Callback):
    """A callback that takes a while after each step."""

    def on_step_end(self, trainer: Any) -> None:
        time.sleep(0.03)


def train(comm: Communicator, where: str) -> None:
    x, y = np.zeros((24, 4), "float32"), np.zeros(24, "int64")
    late = comm.rank == 1
    data = (Slow if late and where == "data" else ArrayDataset)(x, y, classes=2)
    layer = SlowLinear(2)
    layer.late = late and where == "forward"
    slow = SlowRanks(least=0.05)
    callbacks: list[Callback] = [Late(), slow] if late and where == "callback Late" else [slow]
    trainer = Trainer(
        Model(Sequential(layer), (4,)),
        SGD(0.1),
        exchange=AllReduce(comm),
        callbacks=callbacks,
        observers=[slow.times],
        progress=False,
    )
    trainer.fit(data, epochs=2, batch_size=2, loader_threads=0)


@pytest.mark.measure
@each("where", ["data", "forward", "callback Late"])
def test_a_slow_rank_is_named_once_per_epoch_with_its_phase(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pydtnn.train"):
        run_threads(3, train, where)
    for epoch in (1, 2):
        told = [text for text in caplog.messages if text.startswith(f"epoch {epoch}: rank 1 ")]
        assert len(told) == 1
        assert f"mostly in {where}: " in told[0]


def test_ranks_that_are_alike_are_not_named() -> None:
    alike = [{"forward": 1.0, "backward": 2.0}, {"forward": 1.3, "backward": 2.1}] * 2
    assert slow_ranks(alike, 1.5) == []
    assert slow_ranks(alike[:1], 1.5) == []
    assert slow_ranks([{}, {}], 1.5) == []


def test_differences_of_a_moment_are_not_named() -> None:
    times = [{"forward": 0.1}, {"forward": 0.3}]
    assert slow_ranks(times, 1.5, least=0.1)
    assert slow_ranks(times, 1.5, least=1.0) == []


def test_the_phase_is_the_one_with_the_largest_difference() -> None:
    times = [{"forward": 1.0, "backward": 5.0}, {"forward": 5.0, "backward": 6.0}]
    (told,) = slow_ranks([times[0], times[1], times[0]], 1.5)
    assert told.startswith("rank 1 is busy 1.8 times as long as the others, mostly in forward")


@pytest.mark.measure
def test_time_in_calls_and_in_inner_phases_does_not_count() -> None:
    times = PhaseTimes()
    times.begin(Kind.PHASE, "step")
    times.begin(Kind.PHASE, "forward")
    times.begin(Kind.FORWARD, "linear0")
    times.begin(Kind.CALL, "allreduce")
    time.sleep(0.05)
    for _ in range(4):
        times.end()
    assert 0 <= times.seconds["forward"] < 0.04
    assert 0 <= times.seconds["step"] < 0.04
