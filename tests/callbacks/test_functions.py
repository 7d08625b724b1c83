"""Callbacks from plain functions."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pydtnn.callbacks import FunctionCallback
from pydtnn.comm import Communicator
from tests.each import each
from tests.small_training import small_fit, small_trainer


@pytest.mark.threads(2)
def test_a_function_is_called_after_every_epoch_on_every_rank(comm: Communicator) -> None:
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
def test_other_functions_are_refused(given: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=re.escape(sentence)):
        small_trainer(None, given)
    with pytest.raises(TypeError, match="on_step_end must be a function of the trainer, got 'x'"):
        FunctionCallback(on_step_end="x")  # type: ignore[arg-type]


def test_functions_of_every_event_are_called_in_order_and_may_end_training() -> None:
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
