"""Local SGD and post-local SGD do what Stich and Lin et al. say."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import ElasticAveraging, LocalSGD, PostLocalSGD
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.parallel.schemes.course import (
    RULES,
    assert_close,
    checksum,
    data,
    fit,
    simulate,
    train,
    train_serially,
    trainer_of,
)
from tests.small_training import Recorder, checksums


@pytest.mark.few(3)
@pytest.mark.threads(1, 2, 3, 4, 5)
@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("decay", [0.0, 0.02])
def test_local_sgd_with_period_1_is_serial_sgd_uneven_tails_included(comm, decay):
    ours = train(LocalSGD(comm, period=1), SGD(0.2, weight_decay=decay))
    assert_close(ours, train_serially(SGD(0.2, weight_decay=decay)))


@pytest.mark.threads(1, 3, 4)
@each("period", [3, 8])
def test_local_sgd_is_what_independent_ranks_and_averages_by_samples_give(comm, period):
    seen = np.zeros(comm.size)

    def step(number: int, w: np.ndarray, grads, samples: np.ndarray) -> np.ndarray:
        w -= 0.2 * grads()
        seen[:] += samples
        mean = w.T @ seen / seen.sum() if seen.sum() else w[0].copy()
        if (number + 1) % period == 0:
            w[:], seen[:] = mean, 0
        return mean

    assert_close(train(LocalSGD(comm, period=period), SGD(0.2)), simulate(comm.size, 3, step))


@pytest.mark.threads(3)
@each("rule", ["momentum", "adam"])
@each("scheme", [LocalSGD, PostLocalSGD, ElasticAveraging])
def test_a_rank_without_samples_makes_no_update(comm, scheme, rule):
    """The last batch of an epoch is one sample: on all ranks but one nothing is to be learned."""
    seen = [0]
    values = [np.empty(0)]
    moved = []

    def look(trainer: Trainer) -> None:
        seen.append(trainer.exchange.samples)
        values.append(trainer.model.buffers[0].values.copy())
        moved.append(not np.array_equal(values[-1], values[-2]))

    trainer = trainer_of(scheme(comm, period=100), RULES[rule](), callbacks=[Recorder(look)])
    trainer.fit(data(), epochs=2, global_batch_size=9)
    assert moved == (np.diff(seen) > 0).tolist()
    assert sum(comm.gather_object(moved.count(False))) == 2 * 2
    assert trainer.optimizer.iterations == 10  # schedules go on


@pytest.mark.few(3)
@pytest.mark.threads(1, 2, 3)
@pytest.mark.mpi(2)
@pytest.mark.parametrize("rule", RULES)
def test_post_local_sgd_is_synchronous_at_first_with_any_rule(comm, rule):
    trainer = trainer_of(PostLocalSGD(comm, after=15, period=4), RULES[rule]())
    assert_close(fit(trainer), train_serially(RULES[rule]()))
    states = comm.gather_object(checksums(trainer.optimizer.state()))
    assert all(state == states[0] for state in states)


@pytest.mark.threads(3)
def test_post_local_sgd_is_local_afterwards_and_states_of_optimizers_differ(comm):
    met = []

    def look(trainer: Trainer) -> None:
        met.append(len(set(checksum(comm, trainer))) == 1)

    exchange = PostLocalSGD(comm, after=6, period=4)
    trainer = trainer_of(exchange, SGD(0.2, momentum=0.9), callbacks=[Recorder(look)])
    fit(trainer)
    assert met == [step <= 6 or step % 4 == 0 for step in range(1, 16)]
    states = comm.gather_object(checksums(trainer.optimizer.state()))
    assert states[0] != states[1]
