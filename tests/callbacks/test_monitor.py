"""Callbacks that watch a value: when it counts as better, and when training stops."""

import math

import pytest

from pydtnn.callbacks import BestWeights, EarlyStopping, StopAtMetric
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_training import follow, small_data, small_fit, small_trainer

NAN = math.nan


@each(
    ("options", "values", "stops"),
    [
        ({}, [3, 2, 2.5, 1, 1, 1], 5),
        ({"min_delta": 0.5}, [3, 2.8, 2.6], 2),
        ({}, [NAN, 2, NAN, 1, NAN, NAN], 5),  # NaN is never better
    ],
)
def test_early_stopping_waits_for_its_patience_and_counts_from_the_best(options, values, stops):
    callback = EarlyStopping("val_loss", 2, **options)
    assert follow(callback, values) == [False] * stops + [True]


@each(
    ("monitor", "mode", "expected"),
    [
        ("val_accuracy", None, 0.7),
        ("accuracy", "min", 0.2),
        ("loss", None, 0.2),
        ("loss", "max", 0.7),
    ],
)
def test_which_way_is_better_follows_from_the_metric_unless_told(monitor, mode, expected):
    callback = EarlyStopping(monitor, 9, mode=mode)
    follow(callback, [0.5, 0.7, 0.2], monitor)
    assert callback.best == expected


def test_stop_at_metric_stops_where_the_value_is_as_good_as_wanted():
    values = [0.5, NAN, 0.9, 0.3]
    assert follow(StopAtMetric("accuracy", 0.9), values, "accuracy") == [False, False, True, True]
    assert follow(StopAtMetric("loss", 0.1), [0.2, 0.1], "loss") == [False, True]


@each("callback", [EarlyStopping("val_loss", 1), StopAtMetric("val_loss", 1.0)])
def test_a_run_that_had_come_to_its_end_makes_no_step_when_resumed(callback):
    follow(callback, [1.0, 2.0])
    resumed = type(callback)("val_loss", 1)
    resumed.load(callback.state())
    assert small_fit(small_trainer(None, resumed)) == []


def test_an_unknown_value_to_monitor_is_refused_before_any_work():
    trainer = small_trainer(None, EarlyStopping("val_acuracy"))
    words = "^EarlyStopping: monitor must be one of loss, .*; did you mean 'val_accuracy' or 'acc"
    with pytest.raises(AgreedError, match=words):
        small_fit(trainer)
    assert trainer.step == trainer.epoch == 0


def test_a_validations_value_without_validation_is_refused_after_the_first_epoch():
    trainer = small_trainer(None, BestWeights("unused", "val_accuracy"))
    with pytest.raises(AgreedError, match=r"got 'val_accuracy'; pass a validation set"):
        trainer.fit(small_data()[0], epochs=1, batch_size=8)
