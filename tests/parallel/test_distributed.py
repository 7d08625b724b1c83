"""Ranks share the work and nothing else changes: the same training on 1, 2, 3 and 4 ranks."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm import create_communicator
from pydtnn.data import ArrayDataset
from pydtnn.layers import Conv2d, Dropout, Flatten, GroupNorm, Linear, MaxPool2d, ReLU, Sequential
from pydtnn.model import Model
from pydtnn.optimizers import SGD, Adam, Optimizer
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.training.trainer import Trainer
from tests.small_training import Result, assert_same_training, small_data, small_trainer

SHAPE = (8, 8, 3)


def net() -> Sequential:
    """All that does not mix samples: no batch norm."""
    return Sequential(
        Conv2d(6, 3, padding=1),
        GroupNorm(2),
        ReLU(),
        MaxPool2d(2),
        Dropout(0.2),
        Flatten(),
        Linear(4),
    )


def data() -> ArrayDataset:
    """37 samples: no batch size divides them."""
    rng = np.random.default_rng(0)
    return ArrayDataset(rng.normal(size=(37, *SHAPE)), rng.integers(4, size=37), classes=4)


def train(
    exchange: GradientExchange, optimizer: Optimizer, *, accumulation: int = 1, bucket: int = 512
) -> Result:
    """Three epochs of five steps, the last of them short; return the weights and the history."""
    model = Model(net(), SHAPE, backend="numpy", dtype="float64", bucket_bytes=bucket)
    trainer = Trainer(model, optimizer, exchange=exchange, accumulation=accumulation)
    history = trainer.fit(data(), data(), epochs=3, global_batch_size=8, seed=5)
    return {name: np.array(value) for name, value in model.state().items()}, history


RULES = {
    "sgd": lambda: SGD(0.1, momentum=0.9, weight_decay=0.01),
    "clipped": lambda: Adam(0.01, clip_norm=0.1),
}


@pytest.fixture(scope="module")
def serial() -> dict[str, tuple]:
    comm = create_communicator("serial")
    return {name: train(AllReduce(comm), rule()) for name, rule in RULES.items()}


@pytest.mark.few(5)
@pytest.mark.threads(1, 3, 8)
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("rule", "overlap", "accumulation", "bucket"),
    [
        *(("sgd", True, 1, 512), ("sgd", False, 1, 512), ("clipped", True, 1, 512)),
        *(("sgd", True, 2, 512), ("sgd", True, 3, 1)),
    ],
)
def test_any_number_of_ranks_trains_alike_with_the_same_bytes_on_all_of_them(
    comm, serial, rule, overlap, accumulation, bucket
):
    """8 ranks and a last batch of 5: three ranks have nothing to do in it."""
    accumulation = min(accumulation, 8 // comm.size)  # at most the samples of a rank
    exchange = AllReduce(comm, overlap=overlap)
    weights, history = train(exchange, RULES[rule](), accumulation=accumulation, bucket=bucket)
    assert_same_training((weights, history), serial[rule])
    mine = {name: value.tobytes() for name, value in weights.items()}
    for other in comm.gather_object((mine, history)):
        assert other == (mine, history)


@pytest.mark.threads(2, 3)
@pytest.mark.mpi(2)
def test_ranks_hold_the_same_statistics_after_training_without_validation(comm):
    trainer = small_trainer(comm)
    trainer.fit(small_data()[0], global_batch_size=8)
    mine = {name: value.tobytes() for name, value in trainer.model.state().items()}
    assert all(other == mine for other in comm.gather_object(mine))


@pytest.mark.threads(3)
def test_running_statistics_are_averaged_weighted_by_samples(comm):
    trainer = small_trainer(comm)
    statistics = trainer.model.statistics
    statistics.running[:] = comm.rank
    statistics.samples = 1.0 + comm.rank
    for _ in range(2):  # the second time finds nothing to do
        trainer.synchronise()
        np.testing.assert_allclose(statistics.running, (0 * 1 + 1 * 2 + 2 * 3) / 6, rtol=1e-15)


@pytest.mark.threads(2)
def test_traffic_is_counted(comm):
    model = Model(net(), SHAPE, backend="numpy", dtype="float64")
    exchange = AllReduce(comm)
    trainer = Trainer(model, SGD(0.1), exchange=exchange, check_equal=0)
    trainer.fit(data(), epochs=1, global_batch_size=8)
    parameters = model.buffers[0].size * 8
    totals = 3 * 8  # loss, accuracy and count of each step
    # On two ranks each sends half of what is broadcast, and as much as what is summed.
    assert exchange.comm.traffic.bytes == parameters / 2 + 5 * parameters + 5 * totals
    assert exchange.comm.traffic.messages == 6 * len(model.buckets) + 5
    assert 0 < trainer.seconds["communication"] < trainer.seconds["steps"]
