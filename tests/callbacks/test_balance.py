"""Parts of a batch follow the speed of ranks, and change no gradient."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.callbacks import Balance, Callback, SlowRanks
from pydtnn.callbacks.balance import Epoch, divide, times_of_places
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.layers import BatchNorm, Linear, ReLU, Sequential
from pydtnn.optimizers import SGD
from pydtnn.parallel import AllReduce
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import LocalSGD
from pydtnn.parallel.sums import Sums
from pydtnn.utils import clock
from tests.each import each
from tests.small_training import Ticks, spend

SAMPLES, BATCH = 234, 48


class Shares(Callback):
    """Give the ranks other parts in each epoch."""

    def __init__(self, shares: Sequence[tuple[int, ...] | None]) -> None:
        self.shares = shares

    def on_epoch_start(self, trainer: Any) -> None:
        trainer.shares = self.shares[trainer.epoch]


class Delayed(ReLU):
    """A layer that takes a time per sample."""

    seconds = 0.0

    def forward(self, x: Any, *, context: Any) -> Any:
        spend(self.seconds * len(x))
        return super().forward(x, context=context)


def data() -> ArrayDataset:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, 6)).astype("f4")
    return ArrayDataset(x, rng.integers(0, 3, SAMPLES), classes=3)


def trained(
    comm: Communicator,
    callbacks: Sequence[Callback],
    *,
    shards: int | None = None,
    accumulation: int = 1,
    norm: bool = False,
) -> tuple[dict[str, Any], list[float]]:
    """Train with a last step of fewer samples; return parameters and losses."""
    layers = [Linear(8), *([BatchNorm()] if norm else []), ReLU(), Linear(3)]
    model = Model(Sequential(*layers), (6,), dtype="float64")
    sums = Sums if shards is None else partial(ExactSums, shards=shards)
    options: Any = {"callbacks": callbacks, "accumulation": accumulation, "progress": False}
    exchange = AllReduce(comm, sums=sums)
    trainer = Trainer(model, SGD(0.05, momentum=0.9), exchange=exchange, **options)
    trainer.fit(data(), data(), epochs=3, global_batch_size=BATCH)
    return {name: value.copy() for name, value in model.state().items()}, trainer.losses


UNEVEN = (None, (5, 20, 16, 7), (1, 1, 1, 45))


@each("accumulation", [1, 3])
def test_gradients_are_the_mean_over_the_batch_for_any_parts(accumulation):
    expected, losses = trained(Serial(), [])
    everywhere = run_threads(
        4, lambda comm: trained(comm, [Shares(UNEVEN)], accumulation=accumulation)
    )
    for state, own in everywhere:
        np.testing.assert_allclose(own, losses, rtol=1e-12)
        for name, value in expected.items():  # float64: sums of 48 terms in another order
            np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-13)


def test_in_exact_training_the_bytes_remain_for_any_parts():
    expected, losses = trained(Serial(), [], shards=12, norm=True)
    shares = ((3, 3, 3, 3), (1, 5, 4, 2), (9, 1, 1, 1))
    everywhere = run_threads(4, lambda comm: trained(comm, [Shares(shares)], shards=12, norm=True))
    for state, own in everywhere:
        assert own == losses
        for name, value in expected.items():
            assert state[name].tobytes() == value.tobytes()


def delayed(comm: Communicator, epochs: int) -> list[Any]:
    """Train with a last rank that is slower; return the parts of each epoch."""
    found: list[Any] = []
    layer, slow = Delayed(), SlowRanks(1e9)
    layer.seconds = 2 if comm.rank == comm.size - 1 else 1
    callbacks = [slow, Balance(slow), lambda one: found.append(one.shares)]
    options: Any = {"callbacks": callbacks, "observers": [slow.times], "progress": False}
    model = Model(Sequential(Linear(4), layer, Linear(3)), (6,))
    with clock.used(Ticks()):
        trainer = Trainer(model, SGD(0.05), exchange=AllReduce(comm), **options)
        trainer.fit(data(), epochs=epochs, global_batch_size=BATCH, loader_threads=0)
        trainer.fit(data(), more_epochs=1, global_batch_size=BATCH // 2, loader_threads=0)
    return found


def test_a_rank_of_half_the_speed_gets_half_the_samples(caplog):
    """And a further training with another batch begins with equal parts."""
    with caplog.at_level(logging.WARNING, "pydtnn.train"):
        everywhere = run_threads(4, lambda comm: delayed(comm, 2))
    assert all(found == everywhere[0] for found in everywhere)  # equal on all ranks
    assert everywhere[0] == [(14, 13, 14, 7), (14, 13, 14, 7), (7, 7, 7, 3)]
    assert "epoch 1: samples of the ranks in a batch: 14, 13, 14, 7" in caplog.text


@each(
    ("shares", "times", "expected"),
    [
        ([16, 16, 16, 16], [1.0, 1.0, 1.0, 1.0], None),
        ([16, 16, 16, 16], [1.0, 1.0, 1.0, 1.02], None),  # saves less than 3 %
        ([16, 16, 16, 16], [1.0, 1.0, 1.0, 2.0], (19, 18, 18, 9)),
        ([19, 18, 18, 9], [1.12, 1.1, 1.1, 1.1], None),
        ([32, 32], [1.0, 9.0], (56, 8)),  # at least a quarter of an equal part
        ([8, 8, 8], [1.0, 100.0, 100.0], (16, 4, 4)),  # at most twice one
        ([2, 2, 2, 2], [1.0, 1.0, 1.0, 2.0], (3, 2, 2, 1)),
        ([4, 4], [0.0, 1.0], None),  # nothing was measured
    ],
)
def test_parts_are_such_that_the_slowest_rank_ends_as_early_as_possible(shares, times, expected):
    assert divide(Epoch(tuple(shares), tuple(times))) == expected


def test_time_that_does_not_depend_on_the_part_is_found_from_two_epochs():
    def measured(shares: tuple[int, ...]) -> Epoch:
        fixed, each = (1.0, 1.0, 4.0), (1.0, 1.0, 2.0)
        return Epoch(shares, tuple(f + e * n for f, e, n in zip(fixed, each, shares, strict=True)))

    first = measured((16, 16, 16))
    second = measured(divide(first) or ())
    third = divide(second, first)
    assert third == (20, 20, 8)  # 21, 21 and 20 s: no other parts take less
    assert divide(measured(third), second) is None


def test_ranks_with_the_same_samples_have_the_part_of_the_slowest():
    everywhere = [{"forward": 1.0, "update": 9.0}, {"forward": 2.0}, {"data": 1.0}, {}]
    assert times_of_places(everywhere, [0, 0, 1, 1]) == [2.0, 1.0]


def test_parts_are_part_of_a_checkpoint():
    before, after = Balance(SlowRanks()), Balance(SlowRanks())
    before._latest = (3, 5)
    after.load(before.state())
    assert after.state() == {"shares": [3, 5]}
    with pytest.raises(ValueError, match=r"^Balance: shares must be positive numbers, got \[0"):
        after.load({"shares": [0, 8]})
    assert after.state() == {"shares": [3, 5]}


def test_a_scheme_whose_ranks_train_independently_is_refused():
    def run(comm: Communicator) -> str:
        slow, model = SlowRanks(), Model(Sequential(Linear(3)), (6,))
        options: Any = {"callbacks": [slow, Balance(slow)], "observers": [slow.times]}
        trainer = Trainer(model, "sgd", exchange=LocalSGD(comm), **options)
        with pytest.raises(ValueError, match="sums gradients in every step, got LocalSGD") as told:
            trainer.fit(data(), global_batch_size=BATCH)
        return str(told.value)

    assert len(set(run_threads(2, run))) == 1
