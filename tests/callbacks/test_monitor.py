"""Callbacks that watch a value: when it counts as better, and when training stops."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pydtnn.callbacks import (
    BestWeights,
    EarlyStopping,
    Monitor,
    StopAtMetric,
)
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_training import (
    follow,
    small_data,
    small_fit,
    small_trainer,
)

NAN = math.nan


def test_early_stopping_waits_for_its_patience_and_counts_from_the_best() -> None:
    assert follow(EarlyStopping("val_loss", 2), [3, 2, 2.5, 1, 1, 1]) == [False] * 5 + [True]


def test_early_stopping_does_not_count_gains_below_min_delta() -> None:
    assert follow(EarlyStopping("val_loss", 2, 0.5), [3, 2.8, 2.6]) == [False, False, True]


def test_nan_is_never_better() -> None:
    callback = EarlyStopping("val_loss", 2)
    assert follow(callback, [NAN, 2, NAN, 1, NAN, NAN]) == [False] * 5 + [True]
    assert callback.best == 1


@each(
    ("monitor", "mode", "expected"),
    [
        ("val_accuracy", None, 0.7),
        ("accuracy", "min", 0.2),
        ("loss", None, 0.2),
        ("loss", "max", 0.7),
    ],
)
def test_which_way_is_better_follows_from_the_metric_unless_told(
    monitor: str, mode: str | None, expected: float
) -> None:
    callback = EarlyStopping(monitor, 9, mode=mode)
    follow(callback, [0.5, 0.7, 0.2], monitor)
    assert callback.best == expected


def test_stop_at_metric_stops_where_the_value_is_as_good_as_wanted() -> None:
    values = [0.5, NAN, 0.9, 0.3]
    assert follow(StopAtMetric("accuracy", 0.9), values, "accuracy") == [False, False, True, True]
    assert follow(StopAtMetric("loss", 0.1), [0.2, 0.1], "loss") == [False, True]


def test_stop_at_metric_ends_training_on_all_that_is_left() -> None:
    trainer = small_trainer(None, StopAtMetric("loss", 100))
    assert len(small_fit(trainer, epochs=3)) == 1


@each("callback", [EarlyStopping("val_loss", 1), StopAtMetric("val_loss", 1.0)])
def test_a_run_that_had_come_to_its_end_makes_no_step_when_resumed(callback: Any) -> None:
    follow(callback, [1.0, 2.0])
    resumed = type(callback)("val_loss", 1)
    resumed.load(callback.state())
    assert small_fit(small_trainer(None, resumed)) == []


def test_an_unknown_value_to_monitor_is_refused_before_any_work() -> None:
    trainer = small_trainer(None, EarlyStopping("val_acuracy"))
    expected = (
        "EarlyStopping: monitor must be one of loss, accuracy, val_loss, val_accuracy, "
        "got 'val_acuracy'; did you mean 'val_accuracy' or 'accuracy'?"
    )
    with pytest.raises(AgreedError) as caught:
        small_fit(trainer)
    assert str(caught.value) == expected
    assert trainer.step == trainer.epoch == 0


def test_a_validations_value_without_validation_is_refused_after_the_first_epoch() -> None:
    trainer = small_trainer(None, BestWeights("unused", "val_accuracy"))
    with pytest.raises(AgreedError, match=r"got 'val_accuracy'; pass a validation set"):
        trainer.fit(small_data()[0], epochs=1, batch_size=8)


def test_a_callback_of_ones_own_says_only_what_follows_from_the_value() -> None:
    class Count(Monitor):
        improvements = 0

        def on_value(self, trainer: Any, value: float, improved: bool) -> None:
            self.improvements += improved

    callback = Count("val_loss")
    follow(callback, [3, 2, 4, 1])
    assert callback.improvements == 3
