"""Steps with synchronised batch norm, which are those of one rank, and with recomputation."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
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
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.sums import Sums
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.small_training import Result, assert_same_training, checksums

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


def data(samples: int) -> ArrayDataset:
    rng = np.random.default_rng(0)
    x = 3 + rng.normal(size=(samples, *SHAPE))
    return ArrayDataset(x, rng.integers(3, size=samples), classes=3)


def train(
    comm: Communicator,
    sync: bool,
    fuse: bool,
    *,
    backend: str = "cpu",
    dtype: str = "float64",
    recompute: Any = None,
    exact: bool = False,
    accumulation: int = 1,
) -> Result:
    """Three epochs of five steps; the last of each has 5 samples."""
    own: Any = {"threads": 1, "tuning": "fixed"} if backend == "cpu" else {}
    kernels = create_backend(backend, **own)
    own = {"dtype": dtype, "bucket_bytes": 512, "fuse": fuse, "recompute": recompute}
    model = Model(net(), SHAPE, backend=kernels, **own)
    assert fuse == any(isinstance(layer, NormAddReLU) for layer in model.layers)
    assert recompute is None or model.cuts
    optimizer = SGD(0.05, momentum=0.9, weight_decay=0.01)
    exchange = AllReduce(comm, sums=partial(ExactSums, shards=4) if exact else Sums)
    options: Any = {"sync_batch_norm": sync, "accumulation": accumulation, "progress": False}
    trainer = Trainer(model, optimizer, exchange=exchange, **options)
    samples = 40 if exact or (accumulation > 1 and not sync) else 37
    history = trainer.fit(data(samples), data(37), epochs=3, global_batch_size=8, seed=5)
    state = model.state() | {n: np.array(v) for n, v in optimizer.state().items()}
    return {name: np.array(value) for name, value in state.items()}, history


@pytest.fixture(scope="module")
def serial() -> dict[bool, Result]:
    """One rank, one batch: with and without fusion."""
    return {fuse: train(Serial(), False, fuse) for fuse in (False, True)}


@pytest.mark.few(3)
@pytest.mark.threads(1, 3, 8)
@pytest.mark.mpi(2)
@pytest.mark.parametrize("fuse", [False, True])
def test_ranks_compute_what_one_computes_on_the_whole_batch(comm, fuse, serial):
    """8 ranks and a last batch of 5: three ranks have nothing to do in it."""
    result = train(comm, True, fuse)
    assert_same_training(result, serial[fuse])
    mine = {name: value.tobytes() for name, value in result[0].items()}
    assert all(other == mine for other in comm.gather_object(mine))


@pytest.mark.threads(2)
@each(("fuse", "accumulation"), [(False, 3), (True, 2)])
def test_micro_batches_are_normalised_together(comm, fuse, accumulation, serial):
    result = train(comm, True, fuse, accumulation=accumulation)
    assert_same_training(result, serial[fuse])


@pytest.mark.threads(2)
def test_the_reference_backend_agrees_and_without_it_ranks_normalise_by_themselves(comm, serial):
    """Otherwise the tests above would prove nothing."""
    assert_same_training(train(comm, True, True, backend="numpy"), serial[True])
    result = train(comm, False, True)
    assert abs(result[1][-1]["loss"] - serial[True][1][-1]["loss"]) > 1e-6


@pytest.mark.few(1)
@pytest.mark.threads(2)
@pytest.mark.parametrize(
    ("sync", "options"),
    [
        (False, {"accumulation": 2}),
        (True, {"accumulation": 2}),
        (False, {"exact": True}),
        (True, {"exact": True}),
    ],
)
def test_training_has_the_same_bytes_with_recomputation(comm, sync, options):
    for recompute, fuse in ((4, True), ("auto", False)):
        expected, found = (
            train(comm, sync, fuse, dtype="float32", recompute=cuts, **options)
            for cuts in (None, recompute)
        )
        assert found[1] == expected[1]
        assert checksums(found[0]) == checksums(expected[0])


@pytest.mark.threads(2)
def test_a_limit_that_one_rank_cannot_keep_is_refused_on_all_before_the_first_step(comm):
    for limit, refused in ((10 if comm.rank else 1 << 40, True), (1 << 40, False)):
        model = Model(net(), SHAPE, recompute="auto", memory_limit=limit)
        trainer = Trainer(model, SGD(0.05), exchange=AllReduce(comm), progress=False)
        words = "rank 1: Model: memory_limit must be at least .* for 4 samples"
        with pytest.raises(AgreedError, match=words) if refused else nullcontext():
            trainer.fit(data(16), epochs=1, batch_size=4)
        assert (trainer.losses == []) == refused
        assert refused or model.cuts == ()
