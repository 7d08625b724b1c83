"""What callbacks hear, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pydtnn.callbacks import (
    EMA,
    Callback,
    Checkpointer,
    EarlyStopping,
    ProgressBar,
    ReduceOnPlateau,
    StopAtMetric,
    TensorBoard,
)
from tests.each import each
from tests.small_training import small_fit, small_trainer

NAN = math.nan


def test_a_callback_hears_everything_in_order_and_does_nothing_by_default() -> None:
    heard: list[str] = []

    class Listener(Callback):
        def on_fit_start(self, trainer: Any, epochs: int, steps: int) -> None:
            super().on_fit_start(trainer, epochs, steps)
            heard.append(f"fit {epochs}x{steps}")

        def on_epoch_start(self, trainer: Any) -> None:
            super().on_epoch_start(trainer)
            heard.append(f"epoch {trainer.epoch}")

        def on_step_end(self, trainer: Any) -> None:
            super().on_step_end(trainer)
            heard.append(f"step {trainer.step}")

        def on_epoch_end(self, trainer: Any) -> None:
            super().on_epoch_end(trainer)
            heard.append(f"complete {trainer.epoch}")

        def on_fit_end(self, trainer: Any) -> None:
            super().on_fit_end(trainer)
            heard.append("end")

    listener = Listener()
    small_fit(small_trainer(None, listener), epochs=1)
    expected = ["fit 1x4", "epoch 0", "step 1", "step 2", "step 3", "step 4", "complete 1", "end"]
    assert heard == expected
    assert listener.state() == {}


@each(
    ("make", "message"),
    [
        (lambda: EarlyStopping("loss", 0), "EarlyStopping: patience must be at least 1, got 0"),
        (lambda: EarlyStopping("loss", 1, -1), "EarlyStopping: min_delta must be at least 0"),
        (lambda: EarlyStopping("loss", mode="up"), "EarlyStopping: mode must be 'min' or 'max'"),
        (lambda: EMA(1.0), "ExponentialMovingAverage: decay must be at least 0 and"),
        (lambda: EMA(-0.1), "ExponentialMovingAverage: decay must be at least 0 and"),
        (lambda: StopAtMetric("loss", NAN), "StopAtMetric: value must be a finite number, got nan"),
        (lambda: ReduceOnPlateau(factor=1), "ReduceOnPlateau: factor must be above 0 and below 1"),
        (lambda: ReduceOnPlateau(cooldown=-1), "ReduceOnPlateau: cooldown must be at least 0, got"),
        (lambda: ProgressBar(interval=-1), "ProgressBar: interval must be at least 0, got -1"),
        (lambda: TensorBoard("x", histograms=0), "TensorBoard: histograms must be at least 1"),
        (lambda: Checkpointer("x", every_epochs=0), "Checkpointer: every_epochs must be at leas"),
        (lambda: Checkpointer("x", every_epochs=None), "Checkpointer: expected every_epochs or"),
        (lambda: Checkpointer("x", keep=0), "Checkpointer: keep must be at least 1, got 0"),
        (lambda: Checkpointer("x", every="0 steps"), "Checkpointer: every must be a time such"),
        (lambda: Checkpointer("x", every="1.5 steps"), "Checkpointer: every must be a time such"),
        (lambda: Checkpointer("x", every="5"), "Checkpointer: every must be a time such"),
        (lambda: Checkpointer("x", every="nan s"), "Checkpointer: every must be a time such"),
    ],
)
def test_mistakes_are_refused_when_a_callback_is_made(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()
