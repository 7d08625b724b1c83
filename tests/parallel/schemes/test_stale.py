"""Stale gradients are those of some steps ago, and nobody waits for them."""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.comm.wrapper import Wrapper
from pydtnn.data import ArrayDataset
from pydtnn.layers import Linear
from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
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


@pytest.mark.few(6)
@pytest.mark.threads(1, 2, 3, 4, 5)
@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_it_is_serial_sgd_with_delayed_gradients(comm: Communicator, delay: int) -> None:
    assert_close(train(StaleGradients(comm, delay=delay), SGD(0.1)), delayed_serially(delay))


@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
def test_the_delay_goes_with_momentum(comm: Communicator) -> None:
    ours = train(StaleGradients(comm, delay=2), SGD(0.1, momentum=0.5))
    assert_close(ours, delayed_serially(2, momentum=0.5))


@pytest.mark.few(7)
@pytest.mark.threads(1, 3)
@pytest.mark.parametrize("rule", RULES)
def test_without_delay_it_is_serial_training(comm: Communicator, rule: str) -> None:
    ours = train(StaleGradients(comm, delay=0), RULES[rule](), epochs=2)
    assert_close(ours, train_serially(RULES[rule](), 2))


class Patient(StaleGradients):
    """Notes whether a sum has been asked for while the step that began it was still running."""

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        super().start(buckets)
        self.early = 0

    def wait(self, bucket: Bucket) -> None:
        newest = self.steps[0][bucket.index]
        self.early += newest is self.steps[-1][bucket.index]
        super().wait(bucket)


@pytest.mark.threads(2)
def test_no_step_waits_for_its_own_sums(comm: Communicator) -> None:
    for delay, waits in ((0, True), (1, False), (2, False)):
        exchange = Patient(comm, delay=delay)
        fit(trainer_of(exchange, SGD(0.1)), 1)
        assert (exchange.early > 0) == waits


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


def test_the_price_is_a_smaller_learning_rate() -> None:
    """In a bowl of curvature c steps converge below lr = 2 / c; one step late, below 1 / c."""

    def loss(delay: int, lr: float) -> float:
        trainer = trainer_of(
            StaleGradients(Serial(), delay=delay), SGD(lr), net=Linear(3), loss="mse", metrics=()
        )
        trainer.fit(bowl(), epochs=60, global_batch_size=40)
        return trainer.evaluate(bowl())["loss"]

    first = loss(0, 0.0)  # the curvature is 2/3: twice the mean of 3 outputs
    assert loss(0, 2.5) < 1e-3 * first < first < loss(1, 2.5)
    assert loss(1, 0.8) < 1e-3 * first


def bowl() -> ArrayDataset:
    """Least squares with orthonormal features, so that all directions are curved alike."""
    rng = np.random.default_rng(3)
    x = np.linalg.qr(rng.normal(size=(40, 5)))[0] * np.sqrt(40)
    x -= x.mean(axis=0)
    return ArrayDataset(x, x @ rng.normal(size=(5, 3)))


@pytest.mark.threads(2)
def test_it_is_equal_to_all_reduce_bit_by_bit_without_delay(comm: Communicator) -> None:
    make = partial(SGD, 0.1, momentum=0.9)
    ours, plain = train(StaleGradients(comm, delay=0), make()), train(AllReduce(comm), make())
    for name, value in plain.items():
        np.testing.assert_array_equal(ours[name], value)


def test_it_can_be_evaluated_before_training() -> None:
    trainer = trainer_of(StaleGradients(Serial()), SGD(0.1))
    assert np.isfinite(trainer.evaluate(data())["loss"])
