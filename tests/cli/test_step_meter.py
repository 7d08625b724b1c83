"""Times and memory of steps, as a run measures them."""

from types import SimpleNamespace

import pytest

from pydtnn.cli import step_meter
from pydtnn.cli.step_meter import TIMES, StepMeter


def test_memory_is_that_of_the_steps_before_the_first_evaluation(monkeypatch):
    peaks, restarts = iter([300, 150, 160]), []
    monkeypatch.setattr(step_meter, "resident_memory", lambda: 100)
    monkeypatch.setattr(step_meter, "recent_peak_memory", lambda: next(peaks))
    monkeypatch.setattr(step_meter, "restart_peak", lambda: restarts.append(memory.grown))
    memory, trainer = StepMeter(), SimpleNamespace(seconds=dict.fromkeys(TIMES, 0.0))
    for grown in (200, 50):
        memory.on_step_end(trainer)
        assert memory.grown == grown
    memory.on_epoch_end(trainer)
    memory.on_step_end(trainer)
    assert (memory.grown, restarts) == (50, [200])  # without what the first step needs for tuning


def test_the_time_of_a_step_is_a_median_without_the_first_one_and_without_evaluations():
    measure, trainer = StepMeter(), SimpleNamespace(seconds=dict.fromkeys(TIMES, 0.0))
    for i, seconds in enumerate([9.0, 1.0, 2.0, 3.0, 50.0]):
        if i in (0, 3):
            trainer.seconds["steps"] += 100.0
            measure.on_epoch_start(trainer)
        trainer.seconds["steps"] += seconds
        trainer.seconds["communication"] += 0.25
        trainer.seconds["data"] += 0.5
        measure.on_step_end(trainer)
    found = measure.times()
    assert found["first"] == pytest.approx(9.5)
    assert found["seconds"] == pytest.approx(3.0)  # of 1.5, 2.5, 3.5 and 50.5
    assert (found["communication"], found["data"]) == pytest.approx((0.25, 0.5))
    assert found["compute"] == pytest.approx(2.25)
    assert found["low"] < found["seconds"] < found["high"]
    assert found["spread"] == pytest.approx((15.25 - 2.25) / 2 / 3)
    first, others = measure.after(2)
    assert (first["seconds"], others["seconds"]) == pytest.approx((2.0, 27.0))
    assert measure.after(4) == ({}, found)
    assert StepMeter().times() == {}
