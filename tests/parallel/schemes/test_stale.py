"""Stale gradients are those of some steps ago, and nobody waits for them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.comm.wrapper import Wrapper
from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import StaleGradients
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.request import Request
from tests.parallel.schemes.course import (
    BATCH,
    RULES,
    Weights,
    assert_close,
    data,
    fit,
    simulate,
    train,
    train_serially,
    trainer_of,
    weights,
)


def delayed_serially(delay: int, *, momentum: float = 0.0) -> Weights:
    """Serial SGD whose gradients wait in a queue."""
    waiting: deque[np.ndarray] = deque()
    velocity = np.zeros(1)

    def step(number: int, w: np.ndarray, grads, samples: np.ndarray) -> None:
        nonlocal velocity
        waiting.append(grads())
        if len(waiting) > delay:
            velocity = momentum * velocity + waiting.popleft()
            w -= 0.1 * velocity

    return simulate(1, 3, step)


@pytest.mark.few(7)
@pytest.mark.threads(1, 3)
@pytest.mark.parametrize("rule", RULES)
def test_without_delay_it_is_serial_training(comm: Communicator, rule: str) -> None:
    ours = train(StaleGradients(comm, delay=0), RULES[rule](), epochs=2)
    assert_close(ours, train_serially(RULES[rule](), 2))


class Unnoticed(Wrapper):
    """Sums are complete once a rank waits for them, and not before."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.waits: list[Waits] = []

    def started(self, what: str, call: Any, *args: Any) -> Request:
        self.waits.append(Waits(call(*args)))
        return self.waits[-1]


class Waits(Request):
    def __init__(self, inner: Request) -> None:
        self.inner, self.waited = inner, False

    def wait(self) -> None:
        self.inner.wait()
        self.waited = True

    def test(self) -> bool:
        return self.waited


@pytest.mark.threads(1, 2)
def test_an_evaluation_begins_when_all_messages_have_arrived(comm: Communicator) -> None:
    """Training may end there, and no rank may leave with messages that others wait for."""
    inner = Unnoticed(comm)
    trainer = trainer_of(StaleGradients(inner, delay=2), SGD(0.1), progress=False)
    exchange = trainer.exchange
    exchange.start(trainer.model.buckets)
    loader = trainer.setup.loader(data(), BATCH, comm.size, prefetch=0)
    trainer.train_step(next(loader.epoch(0)))
    assert not all(request.waited for request in inner.waits)
    with trainer.averaged():
        assert all(request.waited for request in inner.waits)


@pytest.mark.threads(3)
def test_what_is_late_is_saved_once_for_all_ranks(comm: Communicator, shared_path: Path) -> None:
    trainer = trainer_of(StaleGradients(comm, delay=2), SGD(0.1))
    fit(trainer, 1)
    states = comm.gather_object(trainer.exchange.state())
    for state in states:
        assert state.keys() == states[0].keys()
        assert len(state) == 2 * len(trainer.model.parameters) + 1
        for name, value in states[0].items():
            np.testing.assert_array_equal(state[name], value)


def test_training_may_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    def begin(comm: Communicator) -> None:
        trainer = trainer_of(StaleGradients(comm, delay=2), SGD(0.1))
        fit(trainer, 1)
        save_checkpoint(tmp_path, trainer)

    def go_on(comm: Communicator) -> Weights:
        trainer = trainer_of(StaleGradients(comm, delay=2), SGD(0.1))
        load_checkpoint(tmp_path, trainer)
        fit(trainer, 3)
        return weights(trainer)

    run_threads(3, begin)
    for ours in run_threads(2, go_on):
        assert_close(ours, delayed_serially(2))


def test_it_does_not_go_on_with_another_delay(tmp_path: Path) -> None:
    trainer = trainer_of(StaleGradients(Serial(), delay=2), SGD(0.1))
    fit(trainer, 1)
    save_checkpoint(tmp_path, trainer)
    other = trainer_of(StaleGradients(Serial(), delay=1), SGD(0.1))
    with pytest.raises(
        AgreedError, match="delay must be 2 as in the checkpoint, got 1; continue with the same"
    ):
        load_checkpoint(tmp_path, other)


def test_it_can_be_evaluated_before_training() -> None:
    trainer = trainer_of(StaleGradients(Serial()), SGD(0.1))
    assert np.isfinite(trainer.evaluate(data())["loss"])


@pytest.mark.few(4)
@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
@pytest.mark.parametrize(("delay", "momentum"), [(0, 0.0), (1, 0.0), (2, 0.5), (5, 0.0)])
def test_it_is_serial_sgd_with_delayed_gradients(
    comm: Communicator, delay: int, momentum: float
) -> None:
    ours = train(StaleGradients(comm, delay=delay), SGD(0.1, momentum=momentum))
    assert_close(ours, delayed_serially(delay, momentum=momentum))
