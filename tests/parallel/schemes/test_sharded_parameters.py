"""Ranks that keep parts of gradients and parameters compute what all-reduce does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn import Trainer
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.layers import Linear, Sequential
from pydtnn.model import Model
from pydtnn.models import create_net, gpt
from pydtnn.models.vit import vit
from pydtnn.optimizers import LAMB, SGD, AdamW
from pydtnn.parallel.exchange import AllReduce
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import ShardedGradients, ShardedOptimizer, ShardedParameters
from pydtnn.tools.testing import check_scheme
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from tests.each import each
from tests.parallel.schemes.course import assert_close, fit, train_serially, trainer_of, weights

SCHEMES = [ShardedGradients, ShardedParameters]

NETS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "gpt": (lambda: gpt(11, (6,), depth=2, heads=2, width=8), (6,)),
    "vit": (lambda: vit(8, 2, 2, 3, (8, 8, 3), patch=4), (8, 8, 3)),
    "resnet8": (lambda: create_net("resnet8", 3, (8, 8, 3)), (8, 8, 3)),
}


def train(comm: Communicator, scheme: Any, name: str, **options: Any) -> tuple[Any, ...]:
    """Three steps; losses, parameters and statistics."""
    net, shape = NETS[name]
    rng = np.random.default_rng(1)
    tokens = len(shape) == 1
    x = rng.integers(11, size=(24, *shape)) if tokens else rng.normal(size=(24, *shape))
    y = rng.integers(11, size=(24, 6)) if tokens else rng.integers(3, size=24)
    model = Model(
        net(),
        shape,
        dtype=options.pop("dtype", "float64"),
        bucket_bytes=options.pop("bucket_bytes", 2000),
        recompute=options.pop("recompute", None),
    )
    batch = options.pop("batch", 8)
    trainer = Trainer(
        model,
        options.pop("optimizer", lambda: SGD(0.1, momentum=0.9, clip_norm=0.5))(),
        exchange=scheme(comm, **options.pop("exchange", {})),
        sync_batch_norm=options.pop("sync_batch_norm", True),
        progress=False,
        **options,
    )
    trainer.fit(ArrayDataset(x.astype("float64"), y), epochs=1, global_batch_size=batch)
    return trainer.losses, {k: np.array(v) for k, v in model.state().items()}


@pytest.mark.few(2)
@pytest.mark.threads(3)
@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", NETS)
def test_three_steps_equal_serial_ones(comm, name):
    """And have the bytes of the sharded optimizer."""
    expected = train(Serial(), AllReduce, name)
    before = train(comm, ShardedOptimizer, name)
    for scheme in SCHEMES:
        losses, state = train(comm, scheme, name)
        np.testing.assert_allclose(losses, expected[0], rtol=1e-12)
        for key, value in expected[1].items():
            np.testing.assert_allclose(state[key], value, rtol=0, atol=1e-12, err_msg=key)
            assert (state[key] == before[1][key]).all(), key


CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation": 2},
    "recomputation": {"recompute": 3},
    "adam": {"optimizer": lambda: AdamW(0.01, clip_norm=0.5)},
    "whole parameters": {"optimizer": lambda: LAMB(0.01)},
}


@pytest.mark.threads(3)
@each("case", CASES, few=2)
def test_options_change_nothing(comm, case):
    before = train(comm, ShardedOptimizer, "gpt", **CASES[case])
    for scheme in SCHEMES:
        losses, state = train(comm, scheme, "gpt", **CASES[case])
        assert losses == before[0]
        assert all((state[key] == value).all() for key, value in before[1].items())


@pytest.mark.few(2)
@pytest.mark.threads(3)
@pytest.mark.mpi(2)
@pytest.mark.parametrize(
    ("dtype", "name", "case"),
    [("bfloat16", "resnet8", "accumulation"), ("float16", "vit", "recomputation")],
)
def test_16_bit_models_have_the_bytes_of_the_sharded_optimizer(comm, dtype, name, case):
    options = {"dtype": dtype, "bucket_bytes": 20000, **CASES[case]}
    losses, state = train(comm, ShardedOptimizer, name, **options)
    assert losses[0] != losses[2]
    for scheme in SCHEMES:
        ours, mine = train(comm, scheme, name, **options)
        assert ours == losses
        assert all((mine[key] == value).all() for key, value in state.items())


EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet8": ("float32", {"sync_batch_norm": False, "recompute": 3}),
    "gpt": ("float32", {"optimizer": lambda: LAMB(0.01, clip_norm=0.5)}),
    "vit": ("bfloat16", {"optimizer": lambda: AdamW(0.01, clip_norm=0.5)}),
}


@pytest.mark.few(2)
@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2)
@pytest.mark.parametrize("name", EXACT)
def test_exact_sums_give_the_bytes_of_one_rank(comm, name):
    """Ranks have different numbers of shards, and in the last step some have none."""
    dtype, more = EXACT[name]
    exact = {"sums": partial(ExactSums, shards=5)}
    options = {"dtype": dtype, "bucket_bytes": 20000, "batch": 7, "exchange": exact, **more}
    losses, state = train(Serial(), AllReduce, name, **options)
    for scheme in (ShardedOptimizer, *SCHEMES):
        ours, mine = train(comm, scheme, name, **options)
        assert ours == losses
        assert all(mine[key].tobytes() == value.tobytes() for key, value in state.items())


class Counted(ShardedParameters):
    """Counts gathers, and what a rank has of the parameters at most."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.count, self.most = 0, 0

    def start_gather(self, bucket: Any) -> None:
        self.count += bucket.index not in self._gathered
        super().start_gather(bucket)
        self.most = max(self.most, len(self._gathered))


@pytest.mark.threads(4)
def test_messages_are_those_of_the_formula(comm):
    """Each part is sent to the others for forward, for backward, and as a sum of gradients.

    The last bucket of forward is the first of backward.
    """
    net = Sequential(*(Linear(16, bias=False) for _ in range(6)))
    rng = np.random.default_rng(0)
    data = ArrayDataset(rng.normal(size=(8, 16)), rng.integers(16, size=8))
    model = Model(net, (16,), dtype="float64", bucket_bytes=1)
    exchange = Counted(comm)
    trainer = Trainer(model, SGD(0.1), exchange=exchange, metrics=(), progress=False)
    trainer.fit(data, epochs=1, global_batch_size=8)
    batch = next(trainer.setup.loader(data, 8, 4).epoch(1))
    trainer.train_step(batch, 1)
    exchange.count = exchange.most = 0
    before = comm.traffic.bytes
    trainer.train_step(batch, 1)
    whole, bucket = model.buffers[0].values.nbytes, model.buckets[0].values.nbytes
    losses = 2 * 8 * 3 / 4 * 2  # of loss and samples
    sent = comm.traffic.bytes - before
    assert exchange.count == 2 * 6 - 1
    assert exchange.most == 2
    assert abs(sent - 3 / 4 * (3 * whole - bucket)) <= losses
    for one in model.buckets:
        own = exchange.local_slice(one)
        for array in (one.values, one.grads):  # nothing of the other ranks is left
            assert np.count_nonzero(array) == np.count_nonzero(array[own]) > 0


def test_memory_that_is_released_is_not_resident():
    array = Model(Linear(4), (4,)).backend.zeros((1 << 20,), np.dtype("float32"))
    array[:] = 1
    before = resident()
    Model(Linear(4), (4,)).backend.clear(array[1000:-1000])
    assert not array[1000:-1000].any()
    assert array[:1000].all()
    assert array[-1000:].all()
    assert resident() < before - 3_500_000


def resident() -> int:
    path = Path("/proc/self/statm")
    if not path.exists():
        pytest.skip("no /proc")
    return int(path.read_text().split()[1]) * 4096


def test_what_cannot_be_divided_is_refused():
    model = Model(Linear(3), (4,), formats="weights=e4m3")
    with pytest.raises(ValueError, match="a format of weights rounds whole matrices, got Sharded"):
        Trainer(model, SGD(0.1), exchange=ShardedParameters(Serial()))


@each(
    ("scheme", "rule", "begun", "sizes"),
    [
        (ShardedOptimizer, LAMB, 3, [(1, 1), (5, 1)]),
        (ShardedGradients, AdamW, 3, [(2, 1)]),
        (ShardedParameters, AdamW, 3, [(1, 1), (4, 2)]),
        (partial(ShardedParameters, copies=2), AdamW, 4, [(1, 1), (3, 1), (6, 3)]),
        (partial(ShardedGradients, copies=2), AdamW, 4, [(4, 1)]),
    ],
)
def test_training_continues_on_other_numbers_of_ranks_and_copies(
    scheme, rule, begun, sizes, tmp_path
):
    def begin(comm: Communicator) -> None:
        trainer = trainer_of(scheme(comm), rule(0.02))
        fit(trainer, 1)
        save_checkpoint(tmp_path, trainer)

    def go_on(comm: Communicator, copies: int) -> Any:
        trainer = trainer_of(scheme(comm, copies=copies), rule(0.02))
        load_checkpoint(tmp_path, trainer)
        fit(trainer, 2)
        return weights(trainer)

    run_threads(begun, begin)
    expected = train_serially(rule(0.02), 2)
    for size, copies in sizes:
        for ours in run_threads(size, go_on, copies):
            assert_close(ours, expected)


class Missing(ShardedParameters):
    """Forgets a bucket."""

    def start_gather(self, bucket: Any) -> None:
        if bucket.index == 1 and bucket.index not in self._gathered:
            self._gathered[1] = self.comm.exchange([], [])
        super().start_gather(bucket)


def test_a_parameter_that_is_not_gathered_is_refused_with_its_name():
    with pytest.raises(AssertionError, match=r"Missing on 2 ranks: .* (first|second)\.[wb]"):
        check_scheme(Missing, ranks=[2])
