"""Callbacks and the trainers that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import (
    EMA,
    BestWeights,
    Callback,
    EarlyStopping,
    MLPerfLog,
    ReduceOnPlateau,
    StopAtMetric,
)
from tests.each import each
from tests.small_training import checksums, small_fit, small_model, small_trainer

MAKE = {
    "early stopping": lambda path: EarlyStopping("loss", 1, min_delta=9, restore_best=True),
    "plateau": lambda path: ReduceOnPlateau("loss", patience=0, min_delta=9, cooldown=1),
    "stop at": lambda path: StopAtMetric("loss", 1.05),
    "best weights": lambda path: BestWeights(path / "best.safetensors", "loss", restore_best=True),
    "average": lambda path: EMA(0.9),
}


def train(callback: Callback, seed: int) -> Any:
    trainer = small_trainer(None, callback, model=small_model(seed=seed))
    history = small_fit(trainer, 3)
    return history, checksums(trainer.model.state()), checksums(trainer.optimizer.state())


@each("make", MAKE.values())
def test_a_callback_begins_anew_in_a_second_training(make: Any, tmp_path: Path) -> None:
    used = make(tmp_path)
    assert train(used, 0) == train(make(tmp_path), 0)
    assert train(used, 1) == train(make(tmp_path), 1)


def test_a_callback_continues_with_the_state_of_its_trainer() -> None:
    plateau = ReduceOnPlateau("loss", patience=1, min_delta=9)
    first, second = (small_trainer(None, plateau) for _ in range(2))
    for epochs in (2, 3):  # alternately: the third epoch of each is the second without a gain
        small_fit(first, epochs)
        small_fit(second, epochs)
    assert [trainer.optimizer.lr_factor for trainer in (first, second)] == [0.1, 0.1]


def test_a_state_that_exists_only_in_training_is_refused_in_another_one() -> None:
    class Counter(Callback):
        def on_fit_start(self, trainer: Any, epochs: int, steps: int) -> None:
            self.seen = np.zeros(1)

        def state(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load(self, state: Mapping[str, Any]) -> None:
            self.seen = state["seen"]

    counter = Counter()
    small_fit(small_trainer(None, counter), 1)
    trainer = small_trainer(None, counter)
    with pytest.raises(ValueError, match="^Counter: expected a new object, got that of another"):
        small_fit(trainer, 1)
    assert trainer.optimizer.iterations == 0


def test_the_log_of_a_second_training_has_its_lines_only(tmp_path: Path) -> None:
    log = MLPerfLog(tmp_path / "log", {})
    for _ in range(2):
        small_fit(small_trainer(None, log), 1)
    assert (tmp_path / "log").read_text().count('"run_start"') == 1
