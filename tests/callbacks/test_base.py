"""What callbacks hear, and what they refuse."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import pytest

from pydtnn.callbacks import (
    EMA,
    Callback,
    Checkpointer,
    EarlyStopping,
    FunctionCallback,
    HistoryWriter,
    ProgressBar,
    ReduceOnPlateau,
    StopAtMetric,
)
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_training import small_fit, small_trainer

NAN = math.nan


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
        (lambda: Checkpointer("x", every_epochs=0), "Checkpointer: every_epochs must be at leas"),
        (lambda: Checkpointer("x", every_epochs=None), "Checkpointer: expected every_epochs or"),
        (lambda: Checkpointer("x", keep=0), "Checkpointer: keep must be at least 1, got 0"),
        (lambda: Checkpointer("x", every="0 steps"), "Checkpointer: every must be a time such"),
        (lambda: Checkpointer("x", every="1.5 steps"), "Checkpointer: every must be a time such"),
        (lambda: Checkpointer("x", every="5"), "Checkpointer: every must be a time such"),
        (lambda: Checkpointer("x", every="nan s"), "Checkpointer: every must be a time such"),
    ],
)
def test_mistakes_are_refused_when_a_callback_is_made(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@pytest.mark.threads(2)
def test_a_function_is_called_after_every_epoch_on_every_rank(comm):
    seen: list[tuple[int, float]] = []
    trainer = small_trainer(comm, lambda t: seen.append((t.epoch, t.logs["val_loss"])))
    history = small_fit(trainer, 2)
    assert seen == [(1, history[0]["val_loss"]), (2, history[1]["val_loss"])]


@each(
    ("given", "sentence"),
    [
        (lambda epoch, logs: None, "on_epoch_end must take one argument, the trainer, got a func"),
        (lambda: None, "on_epoch_end must take one argument, the trainer, got a function of ()"),
        (FunctionCallback, "make one: FunctionCallback(...)"),
        (3, "callback must be a Callback, got 3"),
    ],
)
def test_other_functions_are_refused(given, sentence):
    with pytest.raises(TypeError, match=re.escape(sentence)):
        small_trainer(None, given)
    with pytest.raises(TypeError, match="on_step_end must be a function of the trainer, got 'x'"):
        FunctionCallback(on_step_end="x")  # type: ignore[arg-type]


def test_a_method_of_a_callback_may_be_any_callable():
    class Own(Callback):
        on_epoch_end = partial(lambda seen, trainer: seen.append(trainer.epoch), [])

    small_fit(small_trainer(None, Own()), 2)
    assert Own.on_epoch_end.args == ([1, 2],)


def test_functions_of_every_event_are_called_in_order_and_may_end_training():
    calls: list[str] = []

    def noting(event: str) -> Any:
        def note(trainer: Any) -> None:
            calls.append(event)
            trainer.stop = trainer.epoch == 2

        return note

    events = ("on_fit_start", "on_epoch_start", "on_step_end", "on_epoch_end", "on_fit_end")
    trainer = small_trainer(None, FunctionCallback(**{event: noting(event) for event in events}))
    small_fit(trainer, 5)
    epoch = ["on_epoch_start", *["on_step_end"] * 4, "on_epoch_end"]
    assert calls == ["on_fit_start", *epoch, *epoch, "on_fit_end"]


@pytest.mark.threads(2)
def test_results_that_cannot_be_written_stop_all_ranks_before_any_work(comm, tmp_path):
    if comm.rank == 0:
        (tmp_path / "file").write_text("")
    comm.barrier()
    trainer = small_trainer(comm, HistoryWriter(tmp_path / "file"))
    with pytest.raises(AgreedError, match="HistoryWriter: cannot write .*; choose another fol"):
        small_fit(trainer)
    assert trainer.optimizer.iterations == 0
