"""The learning rate falls when progress stalls."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.callbacks import ReduceOnPlateau
from tests.each import each
from tests.small_training import STEPS, small_fit, small_trainer


def factors(callback: ReduceOnPlateau, values: list[float]) -> list[float]:
    trainer = small_trainer(None, callback)
    callback.on_fit_start(trainer, len(values), STEPS)
    result = []
    for value in values:
        trainer.logs = {"val_loss": value}
        callback.on_epoch_end(trainer)
        result.append(trainer.optimizer.lr_factor)
    return result


@each(
    ("options", "values", "expected"),
    [
        ({"patience": 1}, [1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]),
        ({"patience": 0, "cooldown": 2}, [1, 1, 1, 1, 1], [1, 0.5, 0.5, 0.5, 0.25]),
        ({"patience": 0, "min_factor": 0.3}, [1, 1, 1, 1], [1, 0.5, 0.3, 0.3]),
    ],
)
def test_reduce_on_plateau_multiplies_once_per_patience(options, values, expected):
    assert factors(ReduceOnPlateau("val_loss", 0.5, **options), values) == expected


def test_reduce_on_plateau_lowers_the_learning_rate_that_is_used():
    plateau = ReduceOnPlateau("val_loss", 0.5, 0, min_delta=100)
    trainer = small_trainer(None, plateau)
    plain = small_trainer()
    small_fit(trainer, 3), small_fit(plain, 3)
    ratios = [a["lr"] / b["lr"] for a, b in zip(trainer.history, plain.history, strict=True)]
    np.testing.assert_allclose(ratios, [1, 1, 0.5], rtol=1e-15)  # halving is exact, dividing not


@each("change", [{"cooling": None}, {"waited": 1.5}, {"waited": -1}, {"best": "0.5"}])
def test_a_state_that_cannot_be_is_refused_and_changes_nothing(change):
    callback = ReduceOnPlateau(patience=2)
    callback.load({"best": 0.5, "waited": 1, "cooling": 3})
    before = callback.state()
    with pytest.raises((TypeError, ValueError), match="^ReduceOnPlateau: "):
        callback.load({"best": 0.25, "waited": 2, "cooling": 4, **change})
    assert callback.state() == before
