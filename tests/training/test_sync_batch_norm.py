"""Synchronised batch norm: ranks together compute what one rank computes on the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer, create_backend
from pydtnn.comm import Communicator, Serial
from pydtnn.layers import (
    BatchNorm,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
    Sequential,
)
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from tests.each import each
from tests.small_training import Result, assert_same_training

SHAPE = (6, 5, 2)


def net() -> Sequential:
    """Batch norm in all its places: before ReLU, before an addition, in a shortcut, by itself."""
    return Sequential(
        BatchNorm(),
        Conv2d(4, 3, padding="same"),  # with a bias, whose gradient batch norm makes 0
        BatchNorm(),
        ReLU(),
        Residual(
            Sequential(Conv2d(6, 3, padding="same", bias=False), BatchNorm()),
            shortcut=Sequential(Conv2d(6, 1, bias=False), BatchNorm(momentum=0.3)),
        ),
        ReLU(),
        MaxPool2d(2),
        Flatten(),
        Dropout(0.2),
        Linear(5),
        BatchNorm(),
        Linear(3),
    )


def train(
    comm: Communicator, *, sync: bool, fuse: bool, backend: str = "cpu", accumulation: int = 1
) -> Result:
    """Three epochs of five steps; the last of each has 5 samples."""
    rng = np.random.default_rng(0)
    data = ArrayDataset(3 + rng.normal(size=(37, *SHAPE)), rng.integers(3, size=37), classes=3)
    kernels = create_backend(backend, threads=1) if backend == "cpu" else create_backend(backend)
    model = Model(net(), SHAPE, backend=kernels, dtype="float64", bucket_bytes=512, fuse=fuse)
    assert fuse == any(isinstance(layer, NormAddReLU) for layer in model.layers)
    optimizer = SGD(0.05, momentum=0.9, weight_decay=0.01)
    options: Any = {"sync_batch_norm": sync, "accumulation": accumulation}
    trainer = Trainer(model, optimizer, exchange=AllReduce(comm), **options)
    history = trainer.fit(data, data, epochs=3, global_batch_size=8, seed=5)
    state = model.state() | {n: np.array(v) for n, v in optimizer.state().items()}
    return {name: np.array(value) for name, value in state.items()}, history


@pytest.fixture(scope="module")
def serial() -> dict[bool, Result]:
    """One rank, one batch: with and without fusion."""
    return {fuse: train(Serial(), sync=False, fuse=fuse) for fuse in (False, True)}


@pytest.mark.few(4)
@pytest.mark.threads(1, 3, 8)
@pytest.mark.mpi(2)
@pytest.mark.parametrize("fuse", [False, True])
def test_ranks_compute_what_one_computes_on_the_whole_batch(
    comm: Communicator, fuse: bool, serial: dict[bool, Result]
) -> None:
    """8 ranks and a last batch of 5: three ranks have nothing to do in it."""
    result = train(comm, sync=True, fuse=fuse)
    assert_same_training(result, serial[fuse])
    mine = {name: value.tobytes() for name, value in result[0].items()}
    assert all(other == mine for other in comm.gather_object(mine))


@pytest.mark.threads(2)
@each(("fuse", "accumulation"), [(False, 3), (True, 2)])
def test_micro_batches_are_normalised_together(
    comm: Communicator, fuse: bool, accumulation: int, serial: dict[bool, Result]
) -> None:
    result = train(comm, sync=True, fuse=fuse, accumulation=accumulation)
    assert_same_training(result, serial[fuse])


@pytest.mark.threads(2)
def test_the_reference_backend_agrees_and_without_it_ranks_normalise_by_themselves(
    comm: Communicator, serial: dict[bool, Result]
) -> None:
    """Otherwise the tests above would prove nothing."""
    assert_same_training(train(comm, sync=True, fuse=True, backend="numpy"), serial[True])
    result = train(comm, sync=False, fuse=True)
    assert abs(result[1][-1]["loss"] - serial[True][1][-1]["loss"]) > 1e-6
