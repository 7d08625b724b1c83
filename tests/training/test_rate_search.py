"""The search for a learning rate: its result, and that it leaves no traces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.callbacks import EMA
from pydtnn.comm import Communicator
from pydtnn.layers import Linear, Sequential
from pydtnn.optimizers import SGD, Adam
from pydtnn.parallel.compression import create_sums
from pydtnn.parallel.schemes import (
    AllReduce,
    GradientExchange,
    LocalSGD,
    ShardedOptimizer,
    StaleGradients,
)
from pydtnn.training import LearningRates, find_learning_rate
from tests.each import each
from tests.small_training import (
    Recorder,
    checksums,
    small_data,
    small_fit,
    small_model,
    small_trainer,
)

SCHEMES: dict[str, Callable[[Communicator], GradientExchange]] = {
    "allreduce": AllReduce,
    "local SGD": partial(LocalSGD, period=3),
    "stale": StaleGradients,
    "sharded": ShardedOptimizer,
    "compressed": lambda comm: AllReduce(comm, sums=create_sums("top_k", share=0.3)),
}

search = partial(find_learning_rate, train=small_data()[0], steps=9, global_batch_size=8)


OBJECTS = ("callbacks", "_progress", "_check")


def everything(trainer: Trainer) -> list[Any]:
    """All that training may change, to the last bit."""
    traffic, model = trainer.comm.traffic, trainer.model
    with traffic.apart():  # a state that is distributed over the ranks is gathered
        exchange = trainer.exchange.state() if trainer.exchange.buckets else {}
        states = model.state(), trainer.optimizer.state(), exchange
    numbers = {n: v for n, v in vars(trainer).items() if isinstance(v, int | float | dict | list)}
    return [
        *map(checksums, states),
        copy.deepcopy({n: v for n, v in numbers.items() if n not in OBJECTS}),
        (model.loaded, model.statistics.samples, trainer.exchange.samples),
        (traffic.messages, traffic.bytes, trainer.totals.values.tolist()),
    ]


@pytest.mark.few(3)
@pytest.mark.threads(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_changed_and_training_continues_as_without_the_search(comm, scheme):
    trainers = []
    for searched in (False, True):
        optimizer = Adam(0.01) if scheme == "sharded" else SGD(0.05, momentum=0.9)
        exchange = SCHEMES[scheme](comm)
        trainers.append(small_trainer(optimizer=optimizer, exchange=exchange))
        for epochs in (1, 2):
            if searched:
                before = everything(trainers[-1])
                found = search(trainers[-1])
                assert everything(trainers[-1]) == before
                assert len(found.losses) > 3
            small_fit(trainers[-1], epochs=epochs)
    plain, searched = trainers
    assert plain.history == searched.history
    assert checksums(plain.model.state()) == checksums(searched.model.state())
    everywhere = comm.gather_object((found.rates.tolist(), found.losses.tolist()))
    assert all(own == everywhere[0] for own in everywhere)


def quadratic(curvature: float = 1.0) -> tuple[Trainer, ArrayDataset]:
    """Least squares with one parameter; the rate 2 / curvature is the limit of stability."""
    model = Model(Sequential(Linear(1, bias=False)), (1,), backend="numpy", dtype="float64")
    x = np.full((8, 1), (curvature / 2) ** 0.5)
    return Trainer(model, SGD(1.0), loss="mse", metrics=[]), ArrayDataset(x, 3 * x)


@each("curvature", [0.01, 1.0, 100.0])
def test_the_suggestion_follows_the_curvature_and_the_search_ends_beyond_stability(curvature):
    trainer, data = quadratic(curvature)
    found = find_learning_rate(trainer, data, lowest=1e-6, highest=1e4, batch_size=8, steps=200)
    assert found.suggestion is not None
    # steps of a rate r multiply the error by 1 - curvature r
    assert 0.01 < found.suggestion * curvature < 1
    assert 2 < found.rates[-1] * curvature < 20
    assert found.losses[-1] > 4 * found.losses.min()
    assert f"suggested learning rate {found.suggestion:.2g}, after " in str(found)


def test_the_rates_are_those_of_the_updates_and_the_losses_those_before_them():
    trainer, data = quadratic()
    (w,) = (p.master for p in trainer.model.parameters.values())
    w[...] = 0
    found = find_learning_rate(trainer, data, lowest=0.01, highest=0.04, steps=3, batch_size=8)
    np.testing.assert_allclose(found.rates, [0.01, 0.02, 0.04], rtol=1e-12)
    errors = 3 * np.array([1, 0.99, 0.99 * 0.98])
    np.testing.assert_allclose(found.losses, errors**2 / 2, rtol=1e-12)


def test_a_loss_that_is_not_finite_ends_the_search():
    """And neither callbacks nor frozen parameters notice."""
    calls: list[int] = []
    callbacks = EMA(), Recorder(on_step=lambda t: calls.append(t.step))
    trainer = small_trainer(None, *callbacks, model=small_model(dtype="float32"))
    before = everything(trainer)
    found = search(trainer, lowest=1e-3, highest=1e38, stop_at=1e300)
    assert 3 <= len(found.losses) < 9
    assert np.isfinite(found.losses).all()
    assert everything(trainer) == before
    assert (calls, trainer.callbacks[0].state()) == ([], {"updates": 0})
    trainer.model.freeze("conv2d0")
    search(trainer)
    assert checksums(trainer.model.state()) == before[0]


def test_a_loss_that_only_rises_gives_no_suggestion():
    found = LearningRates(np.geomspace(1e-3, 1, 30), np.linspace(1, 2, 30))
    assert found.suggestion is None
    assert str(found) == "no suggestion: the loss did not decrease in 30 steps from 0.001 to 1"


def test_the_suggestion_is_where_the_loss_falls_fastest_before_its_minimum():
    rates = np.geomspace(1e-6, 1, 121)
    losses = -np.tanh(2 * np.log10(rates / 1e-3))  # steepest at 1e-3
    losses[-20:] = np.linspace(5, -0.5, 20)  # falls again, after divergence
    suggestion = LearningRates(rates, losses).suggestion
    assert suggestion == pytest.approx(1e-3, rel=0.06)  # half the distance of two rates
    few = LearningRates(rates[56:65], losses[56:65])  # too few to be smoothed
    assert few.suggestion == pytest.approx(1e-3, rel=1e-12)
    np.testing.assert_array_equal(few.smoothed()[1], few.losses)


@each(
    ("options", "words"),
    [
        ({"lowest": 0}, "lowest must be above 0, got 0"),
        ({"lowest": 2, "highest": 1}, "highest must be above 2"),
        ({"steps": 2}, "steps must be at least 3, got 2"),
        ({"stop_at": 1}, "stop_at must be above 1, got 1"),
    ],
)
def test_limits_that_make_no_search_are_refused(options, words):
    with pytest.raises(ValueError, match=f"^find_learning_rate: {words}"):
        search(small_trainer(), **options)


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    found = search(small_trainer())
    found.plot(tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="abc"):
        found.plot(tmp_path / "rates.abc")
