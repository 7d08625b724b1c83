"""Elastic averaging does what Zhang et al. say."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.data import ArrayDataset
from pydtnn.layers import Linear
from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import ElasticAveraging
from pydtnn.training.trainer import Trainer
from tests.parallel.schemes.course import (
    all_values,
    assert_close,
    data,
    fit,
    simulate,
    train,
    trainer_of,
    weights,
)
from tests.small_training import Recorder


@pytest.mark.few(3)
@pytest.mark.threads(1, 2, 3, 5)
@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize(("period", "beta"), [(1, 1.0), (4, 0.9)])
def test_it_is_the_symmetric_synchronous_variant(
    comm: Communicator, period: int, beta: float
) -> None:
    centre: np.ndarray = np.empty(0)
    alpha = beta / comm.size

    def step(number: int, w: np.ndarray, grads, samples: np.ndarray) -> np.ndarray:
        """Equations 5 and 6: gradients and pulls are those at the same parameters."""
        nonlocal centre
        if number == 0:
            centre = w[0].copy()
        moved = -0.2 * grads()
        if number % period == 0:
            moved -= alpha * (w - centre)
            centre = (1 - beta) * centre + beta * w.mean(axis=0)
        w += moved
        return centre

    ours = train(ElasticAveraging(comm, period=period, beta=beta), SGD(0.2))
    assert_close(ours, simulate(comm.size, 3, step))


@pytest.mark.threads(3)
def test_what_is_evaluated_is_the_centre_and_ranks_go_on_with_their_own(comm: Communicator) -> None:
    def look(trainer: Trainer) -> None:
        own = trainer.model.buffers[0].values.copy()
        found = trainer.evaluate(data())["loss"]
        np.testing.assert_array_equal(trainer.model.buffers[0].values, own)
        for bucket, centre in zip(exchange.buckets, exchange.centre, strict=True):
            bucket.values[...] = centre
        exchange.equal = True  # so that nothing is swapped in
        expected = trainer.evaluate(data())["loss"]
        exchange.equal = False
        trainer.model.buffers[0].values[:] = own
        assert found == expected

    exchange = ElasticAveraging(comm)
    fit(trainer_of(exchange, SGD(0.2), callbacks=[Recorder(look)]))


@pytest.mark.threads(4)
def test_springs_hold_the_ranks_together(comm: Communicator) -> None:
    """Without gradients the ranks' mean and the centre meet, and what they have in all stays."""
    exchange = ElasticAveraging(comm, period=1, beta=0.8)
    trainer = trainer_of(exchange, SGD(0.0))
    exchange.start(trainer.model.buckets)
    trainer.model.buffers[0].values[:] += comm.rank
    first = all_values(comm, trainer)
    before = first.sum(axis=0) + np.concatenate(exchange.centre)
    for _ in range(80):
        exchange.update(trainer.optimizer)
    now = all_values(comm, trainer)
    np.testing.assert_allclose(now.sum(axis=0) + np.concatenate(exchange.centre), before, rtol=1e-9)
    np.testing.assert_allclose(now, np.broadcast_to(before / 5, now.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.threads(3)
def test_training_ends_with_the_centre_everywhere(comm: Communicator) -> None:
    exchange = ElasticAveraging(comm)
    trainer = trainer_of(exchange, SGD(0.2))
    fit(trainer)
    for bucket, centre in zip(exchange.buckets, exchange.centre, strict=True):
        np.testing.assert_array_equal(bucket.values, centre)


@pytest.mark.threads(1, 4)
def test_it_comes_close_to_the_minimum_of_a_convex_loss(comm: Communicator) -> None:
    """Least squares without noise: the minimum is known, and every rank's minimum is the same."""
    rng = np.random.default_rng(1)
    x, truth = rng.normal(size=(40, 5)), rng.normal(size=(5, 3))
    trainer = trainer_of(
        ElasticAveraging(comm, period=4), SGD(0.1), net=Linear(3), loss="mse", metrics=()
    )
    trainer.fit(ArrayDataset(x, x @ truth), epochs=60, global_batch_size=8)
    (w,) = (value for name, value in weights(trainer).items() if name.endswith(".w"))
    assert np.linalg.norm(w - truth.T) < 0.03 * np.linalg.norm(truth)
