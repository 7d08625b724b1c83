"""Exact training: the same bytes for any number of ranks, threads and interruptions."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.data.augment import HorizontalFlip, RandomCrop
from pydtnn.kernels import create_backend
from pydtnn.layers import BatchNorm, Conv2d, GlobalAvgPool2d, Linear, ReLU, Residual, Sequential
from pydtnn.layers.blocks import Net
from pydtnn.model import Model
from pydtnn.optimizers import SGD, Adam, Optimizer
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.reproducible import ExactSums, Stack, Subtree, cover, tree_sum
from pydtnn.parallel.schemes import ShardedGradients, ShardedOptimizer, ShardedParameters
from pydtnn.training.checkpoint import load_checkpoint
from pydtnn.training.trainer import Trainer
from pydtnn.utils.split import even_cuts
from tests.each import each
from tests.small_training import Interrupt, Interrupted, fingerprint, small_data, small_model

SHAPE = (8, 8, 3)
SAMPLES, BATCH, SHARDS = 75, 32, 8
"""The last batch of an epoch has 11 samples: shards of 2 and of 1."""


def data() -> ArrayDataset:
    rng = np.random.default_rng(0)
    return ArrayDataset(
        rng.integers(0, 256, (SAMPLES, *SHAPE), np.uint8), rng.integers(5, size=SAMPLES), classes=5
    )


def small_net() -> Sequential:
    """One of each kind of a residual network's blocks."""
    return Sequential(
        *(Conv2d(16, 3, padding=1, bias=False), BatchNorm(), ReLU()),
        Residual(Sequential(Conv2d(16, 3, padding=1, bias=False), BatchNorm())),
        Residual(
            Sequential(ReLU(), Conv2d(32, 3, stride=2, padding=1, bias=False), BatchNorm()),
            shortcut=Sequential(Conv2d(32, 1, stride=2, bias=False), BatchNorm()),
        ),
        *(ReLU(), GlobalAvgPool2d(), Linear(5)),
    )


def trainer_of(
    comm: Communicator,
    optimizer: Optimizer,
    *,
    scheme: type[GradientExchange] = AllReduce,
    net: Net | None = None,
    sync: bool = False,
    threads: int = 1,
) -> Trainer:
    backend = create_backend("cpu", threads=threads, tuning="fixed")
    net = net or small_net()
    exchange = scheme(comm, sums=partial(ExactSums, shards=SHARDS))
    model = Model(net, SHAPE, backend=backend, bucket_bytes=1 << 14)
    return Trainer(model, optimizer, exchange=exchange, sync_batch_norm=sync)


def fit(trainer: Trainer) -> list[Any]:
    dataset = data()
    trainer.fit(
        dataset,
        dataset,
        epochs=2,
        global_batch_size=BATCH,
        augment=[RandomCrop(2), HorizontalFlip()],
        seed=3,
    )
    return fingerprint(trainer)


CASES: dict[str, Any] = {
    "batch norm per shard": lambda comm: trainer_of(comm, SGD(0.1, momentum=0.9)),
    "synchronised batch norm": lambda comm: trainer_of(comm, SGD(0.1, momentum=0.9), sync=True),
    "clipped Adam": lambda comm: trainer_of(comm, Adam(0.01, clip_norm=0.5)),
    "sharded optimizer": lambda comm: trainer_of(
        comm, SGD(0.1, momentum=0.9), scheme=ShardedOptimizer
    ),
    "sharded gradients": lambda comm: trainer_of(
        comm, SGD(0.1, momentum=0.9), scheme=ShardedGradients, sync=True
    ),
    "sharded parameters": lambda comm: trainer_of(
        comm, Adam(0.01, clip_norm=0.5), scheme=ShardedParameters
    ),
}
SAME_AS = {
    "sharded optimizer": "batch norm per shard",
    "sharded gradients": "synchronised batch norm",
    "sharded parameters": "clipped Adam",
}


@pytest.fixture(scope="module")
def serial() -> dict[str, list[Any]]:
    """What one rank computes, for each case."""
    return {}


@pytest.mark.few(2)
@pytest.mark.threads(1, 3, 8)
@pytest.mark.mpi(2, 3)
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_gives_the_same_bytes(comm, case, serial):
    expected = expected_of(case, serial)
    assert fit(CASES[case](comm)) == expected


def expected_of(case: str, serial: dict[str, list[Any]]) -> list[Any]:
    case = SAME_AS.get(case, case)
    result = serial.get(case) or fit(CASES[case](Serial()))
    return serial.setdefault(case, result)


def test_any_number_of_threads_gives_the_same_bytes():
    one, two = (fit(trainer_of(Serial(), SGD(0.1), threads=threads)) for threads in (1, 2))
    assert one == two


@pytest.mark.threads(1, 3)
@pytest.mark.parametrize(
    "case", ["batch norm per shard", "synchronised batch norm", "sharded parameters"]
)
def test_a_run_is_continued_by_another_number_of_ranks(comm, case, serial, shared_path):
    def rank(other: Communicator) -> None:
        interrupted = CASES[case](other)
        interrupted.callbacks.append(Interrupt(4, shared_path))  # in the middle of an epoch
        with pytest.raises(Interrupted):
            fit(interrupted)

    if comm.rank == 0:
        run_threads(2, rank)
    comm.barrier()
    trainer = CASES[case](comm)
    load_checkpoint(shared_path, trainer)
    assert trainer.optimizer.iterations == 4
    assert fit(trainer) == expected_of(case, serial)


@each("shards", [1, 2, 3, 7, 8, 13])
def test_blocks_of_any_runs_add_up_to_the_same_tree(shards, rng):
    arrays = rng.normal(size=(shards, 5)).astype("float32")
    expected = tree_sum({Subtree(0, i): a.copy() for i, a in enumerate(arrays)}, shards)
    np.testing.assert_allclose(expected, arrays.sum(axis=0), rtol=1e-4, atol=1e-6)
    for ranks in range(1, shards + 1):
        nodes: dict[Subtree, np.ndarray] = {}
        for start, stop in pairwise(even_cuts(shards, ranks)):
            stack = Stack()
            for shard in range(start, stop):
                stack.push(shard, arrays[shard].copy())
            assert list(stack.blocks) == cover(start, stop)
            nodes |= stack.blocks
        np.testing.assert_array_equal(tree_sum(nodes, shards), expected)


@pytest.mark.threads(1, 3)
def test_shards_that_never_have_a_sample_cost_and_change_nothing(comm):
    """The batch is cut into single samples, whether there are as many shards or many more."""
    found = []
    for shards in (SAMPLES, 10**15):
        exchange = AllReduce(comm, sums=partial(ExactSums, shards=shards))
        trainer = Trainer(small_model(), SGD(0.1), exchange=exchange)
        train, validation = small_data()
        trainer.fit(train, validation, global_batch_size=8)
        found.append(fingerprint(trainer))
    if comm.size == 1:  # with more, shards of SAMPLES are those of other ranks
        assert found[0] == found[1]
    assert comm.gather_object(found[1]) == [found[1]] * comm.size


def test_what_would_not_be_exact_is_refused():
    sums = partial(ExactSums, shards=SHARDS)
    with pytest.raises(ValueError, match="Alone: .* cannot be compressed or summed exactly"):
        Trainer(small_model(), SGD(), exchange=Alone(Serial(), sums=sums))
    with pytest.raises(ValueError, match="accumulation must be 1"):
        Trainer(small_model(), SGD(), exchange=AllReduce(Serial(), sums=sums), accumulation=2)
    model = Model(Linear(2), (3,), backend=create_backend("cpu", tuning="measure"))
    with pytest.raises(ValueError, match="not chosen by measurement"):
        Trainer(model, SGD(), exchange=AllReduce(Serial(), sums=sums))


class Alone(GradientExchange):
    """Says nothing."""
