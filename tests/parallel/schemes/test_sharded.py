"""The sharded optimizer computes what all-reduce does, with a part of its state on each rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pydtnn.comm import Communicator, run_threads
from pydtnn.optimizers import LAMB, Adam, Optimizer
from pydtnn.parallel.schemes import ShardedOptimizer
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.trainer import Trainer
from tests.each import each
from tests.parallel.schemes.course import (
    RULES,
    assert_close,
    fit,
    train,
    train_serially,
    trainer_of,
    weights,
)


def slot_sizes(trainer: Trainer) -> dict[int, list[int]]:
    return {b.index: [s.size for s in trainer.optimizer._slots[b.index]] for b in buckets(trainer)}


def buckets(trainer: Trainer):
    return trainer.model.buckets


@pytest.mark.few(8)
@pytest.mark.threads(1, 2, 3, 4, 5)
@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_computes_what_it_does_serially(comm: Communicator, rule: str) -> None:
    assert_close(
        train(ShardedOptimizer(comm), RULES[rule](), epochs=2), train_serially(RULES[rule](), 2)
    )


@pytest.mark.few(3)
@pytest.mark.threads(2, 5)
@pytest.mark.parametrize("rule", ["adam", "clipped_lars"])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_the_size_of_buckets_changes_nothing(
    comm: Communicator, rule: str, bucket_bytes: int
) -> None:
    ours = train(ShardedOptimizer(comm), RULES[rule](), epochs=2, bucket_bytes=bucket_bytes)
    assert_close(ours, train_serially(RULES[rule](), 2))


@pytest.mark.threads(1, 2, 3, 4, 5)
def test_a_rank_keeps_its_part_of_the_state_and_no_more(comm: Communicator) -> None:
    trainer = trainer_of(ShardedOptimizer(comm), Adam(), bucket_bytes=1 << 20)
    (own,) = slot_sizes(trainer).values()
    whole = trainer.model.buffers[0].size
    line = 64 // 8  # elements: cuts lie between cache lines
    assert len(own) == 2
    assert all(abs(size - whole / comm.size) <= line for size in own)
    assert sum(comm.gather_object(own[0])) == whole


@pytest.mark.threads(1, 2, 3)
def test_rules_that_need_whole_parameters_get_them(comm: Communicator) -> None:
    trainer = trainer_of(ShardedOptimizer(comm), LAMB(), bucket_bytes=400)
    loads = np.zeros(comm.size, int)
    for bucket in buckets(trainer):
        own = trainer.exchange.local_slice(bucket)
        for entry in bucket.parameters:
            inside = own.start <= entry.slice.start and entry.slice.stop <= own.stop
            assert sum(comm.gather_object(inside)) == 1
        loads += trainer.exchange.counts[bucket.index]
    largest = max(b.values.size for b in buckets(trainer))
    assert loads.max() - loads.min() <= largest


@pytest.mark.threads(3)
def test_the_state_that_is_saved_is_the_whole_one(comm: Communicator) -> None:
    trainer = trainer_of(ShardedOptimizer(comm), Adam(0.02))
    fit(trainer)
    serial = trainer_of_serial(Adam(0.02))
    ours, expected = trainer.optimizer.state(), serial.optimizer.state()
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def trainer_of_serial(optimizer: Optimizer) -> Trainer:
    def rank(comm: Communicator) -> Trainer:
        trainer = trainer_of(ShardedOptimizer(comm), optimizer)
        fit(trainer)
        return trainer

    return run_threads(1, rank)[0]


@each("optimizer", [Adam, LAMB])
def test_training_may_go_on_with_another_number_of_ranks(
    optimizer: type[Optimizer], tmp_path: Path
) -> None:
    def begin(comm: Communicator) -> None:
        trainer = trainer_of(ShardedOptimizer(comm), optimizer(0.02))
        fit(trainer, 1)
        save_checkpoint(tmp_path, trainer)

    def go_on(comm: Communicator):
        trainer = trainer_of(ShardedOptimizer(comm), optimizer(0.02))
        load_checkpoint(tmp_path, trainer)
        fit(trainer, 3)
        return weights(trainer)

    run_threads(3, begin)
    expected = train_serially(optimizer(0.02))
    for size in (1, 2, 5):
        for ours in run_threads(size, go_on):
            assert_close(ours, expected)


@pytest.mark.threads(4)
def test_it_sends_as_much_as_an_allreduce(comm: Communicator) -> None:
    exchange = ShardedOptimizer(comm)
    trainer = trainer_of(exchange, Adam(), metrics=())
    trainer.exchange.start(buckets(trainer))
    before = exchange.comm.traffic.bytes
    for bucket in buckets(trainer):
        bucket.grads[...] = 1
    exchange.update(trainer.optimizer)
    sent = np.array([exchange.comm.traffic.bytes - before])
    comm.allreduce(sent)
    whole = trainer.model.buffers[0].values.nbytes
    assert sent[0] == 2 * (comm.size - 1) * whole
