"""Stale gradients are those of some steps ago, and nobody waits for them."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import StaleGradients
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.utils.errors import AgreedError
from tests.parallel.schemes.course import (
    RULES,
    Weights,
    assert_close,
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


@pytest.mark.few(4)
@pytest.mark.threads(1, 3)
@pytest.mark.parametrize("rule", RULES)
def test_without_delay_it_is_serial_training(comm, rule):
    ours = train(StaleGradients(comm, delay=0), RULES[rule](), epochs=2)
    assert_close(ours, train_serially(RULES[rule](), 2))


def test_training_may_go_on_with_another_number_of_ranks(tmp_path):
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


def test_it_does_not_go_on_with_another_delay(tmp_path):
    trainer = trainer_of(StaleGradients(Serial(), delay=2), SGD(0.1))
    fit(trainer, 1)
    save_checkpoint(tmp_path, trainer)
    other = trainer_of(StaleGradients(Serial(), delay=1), SGD(0.1))
    with pytest.raises(
        AgreedError, match="delay must be 2 as in the checkpoint, got 1; continue with the same"
    ):
        load_checkpoint(tmp_path, other)


@pytest.mark.few(4)
@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
@pytest.mark.parametrize(("delay", "momentum"), [(0, 0.0), (1, 0.0), (2, 0.5), (5, 0.0)])
def test_it_is_serial_sgd_with_delayed_gradients(comm, delay, momentum):
    ours = train(StaleGradients(comm, delay=delay), SGD(0.1, momentum=momentum))
    assert_close(ours, delayed_serially(delay, momentum=momentum))
