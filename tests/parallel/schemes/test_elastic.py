"""Elastic averaging does what Zhang et al. say."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import ElasticAveraging
from pydtnn.training.trainer import Trainer
from tests.parallel.schemes.course import assert_close, data, fit, simulate, train, trainer_of
from tests.small_training import Recorder


@pytest.mark.few(3)
@pytest.mark.threads(1, 2, 3, 5)
@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize(("period", "beta"), [(1, 1.0), (4, 0.9)])
def test_it_is_the_symmetric_synchronous_variant(comm, period, beta):
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
def test_what_is_evaluated_is_the_centre_and_ranks_go_on_with_their_own(comm):
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
