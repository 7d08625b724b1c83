"""Mixtures of experts: routes, capacities, losses of the router, gradients."""

from __future__ import annotations

from functools import partial
from math import ceil, pi
from typing import Any

import numpy as np
import pytest

from pydtnn import Trainer
from pydtnn.data import ArrayDataset
from pydtnn.layers import Experts, StepContext
from pydtnn.layers.base import Penalties, Shape
from pydtnn.losses import CategoricalCrossEntropy
from pydtnn.model import Model
from pydtnn.models import create_net
from tests.each import each

KINDS: dict[str, dict[str, Any]] = {
    "switch": {"choices": 1, "capacity": 1.0},
    "gshard": {"choices": 2, "capacity": 0.75},
    "mixtral": {"choices": 2, "gated": True},
    "three of them": {"choices": 3, "gated": True, "capacity": 1.2},
}


# -- a reference, token by token


def activate(u: np.ndarray) -> np.ndarray:
    return u / 2 * (1 + np.tanh((2 / pi) ** 0.5 * (u + 0.044715 * u**3)))


def mlp(p: dict[str, np.ndarray], e: int, x: np.ndarray, gated: bool) -> np.ndarray:
    if gated:
        gate = p["gate"][e] @ x
        return p["down"][e] @ (gate / (1 + np.exp(-gate)) * (p["up"][e] @ x))
    hidden = activate(p["up"][e] @ x + p["up_bias"][e])
    return p["down"][e] @ hidden + p["down_bias"][e]


def reference(
    p: dict[str, np.ndarray],
    x: np.ndarray,
    logits: np.ndarray,
    *,
    choices: int,
    capacity: float | None = None,
    gated: bool = False,
    balance: float = 0.01,
    z: float = 0.001,
) -> tuple[np.ndarray, float, int]:
    """Return outputs, the sum of the losses, and how many choices were dropped."""
    y, loss, dropped = np.zeros_like(x), 0.0, 0
    _, length, experts = logits.shape
    for n, sample in enumerate(x):
        taken, of, means = np.zeros(experts), np.zeros(experts), np.zeros(experts)
        for t, token in enumerate(sample):
            scores = logits[n, t]
            softmax = np.exp(scores) / np.exp(scores).sum()
            best = sorted(range(experts), key=lambda e: -scores[e])[:choices]
            total = sum(softmax[e] for e in best) if choices > 1 else 1.0
            for e in best:
                taken[e] += 1
                of[e] += 1 / (length * choices)
                if capacity is None or taken[e] <= ceil(capacity * length * choices / experts):
                    y[n, t] += softmax[e] / total * mlp(p, e, token, gated)
                else:
                    dropped += 1
            means += softmax / length
            loss += z * np.log(np.exp(scores).sum()) ** 2 / length
        loss += balance * experts * (of * means).sum()
    return y, loss, dropped


def made(kind: str, shapes: list[Shape], **options: Any) -> tuple[Model, Any]:
    """Return a model of experts, and inputs for three samples."""
    options = KINDS[kind] | {"balance": 0.3, "z": 0.2} | options
    model = Model(Experts(3, name="e", **options), shapes, dtype="float64", input_gradient=True)
    rng = np.random.default_rng(0)
    for parameter in model.parameters.values():
        parameter.master[...] = rng.normal(size=parameter.shape)
    return model, tuple(rng.normal(size=(3, *shape)) for shape in shapes)


def context(scale: float = 1.0) -> StepContext:
    return StepContext(training=True, samples=np.arange(3), penalties=Penalties(scale))


@each("kind", KINDS)
def test_outputs_and_losses_are_those_of_a_loop_over_tokens(kind):
    model, xs = made(kind, [(7, 4), (7, 5)])
    step = context()
    y, _ = model.forward(xs, step)
    p = {name.rpartition(".")[2]: array for name, array in model.state().items()}
    expected, loss, dropped = reference(p, *xs, **KINDS[kind] | {"balance": 0.3, "z": 0.2})
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
    assert step.penalties is not None
    assert step.penalties.values == [pytest.approx(loss, abs=1e-12)]
    assert (dropped > 0) is ("capacity" in KINDS[kind])
    # without training, nothing is dropped, and nothing added to the loss
    y, _ = model.forward(xs, StepContext(training=False))
    expected, *_ = reference(p, *xs, **KINDS[kind] | {"capacity": None})
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)


@each("kind", KINDS)
def test_gradients_of_outputs_and_losses_are_differences(kind):
    model, xs = made(kind, [(5, 2), (5, 4)])
    dy, scale, step = np.random.default_rng(1).normal(size=(3, 5, 2)), 0.7, 1e-6

    def objective() -> float:
        now = context(scale)
        y, _ = model.forward(xs, now, keep=False)
        assert now.penalties is not None
        return float((dy * y).sum() + scale * sum(now.penalties.values))

    _, saved = model.forward(xs, context(scale))
    dxs = model.backward(dy, saved)
    arrays = {f"input {i}": (x, dx) for i, (x, dx) in enumerate(zip(xs, dxs, strict=True))}
    arrays |= {name: (p.master, p.grad.copy()) for name, p in model.parameters.items()}
    for name, (array, gradient) in arrays.items():
        for index in np.ndindex(array.shape):
            before = array[index]
            values = []
            for moved in (before + step, before - step):
                array[index] = moved
                values.append(objective())
            array[index] = before
            found = (values[0] - values[1]) / (2 * step)
            assert gradient[index] == pytest.approx(found, rel=1e-5, abs=1e-7), (name, index)


# -- training


def test_the_loss_of_training_contains_those_of_routers():
    rng = np.random.default_rng(0)
    x, y = rng.integers(5, size=(2, 8, 6))
    y[:3, 1:4] = 4  # ignored
    losses = {}
    for weight in (0.0, 0.5):
        for loss in ("cross_entropy", CategoricalCrossEntropy(ignore_index=4)):
            options = {"depth": 2, "heads": 1, "width": 4, "experts": 3}
            net = create_net("gpt", 5, (6,), **options, balance=weight, z=weight)
            model = Model(net, (6,), dtype="float64")
            trainer = Trainer(model, "sgd", loss=loss, progress=False)
            trainer.fit(ArrayDataset(x.astype("float32"), y), epochs=1, batch_size=8)
            losses[weight, str(loss)] = trainer.losses[0]
    step = context()
    model = Model(create_net("gpt", 5, (6,), **options, balance=0.5, z=0.5), (6,), dtype="float64")
    model.forward(x.astype("float64"), step)
    assert step.penalties is not None
    assert len(step.penalties.values) == 2
    for loss in ("cross_entropy", str(CategoricalCrossEntropy(ignore_index=4))):
        added = losses[0.5, loss] - losses[0.0, loss]
        assert added == pytest.approx(sum(step.penalties.values) / 8, abs=1e-12)


@each("recompute", [2, ["block0"]])
def test_losses_of_recomputed_layers_count_once(recompute):
    rng = np.random.default_rng(0)
    x, y = rng.integers(5, size=(2, 24, 6))
    net = partial(create_net, "gpt", 5, (6,), depth=2, heads=1, width=4, experts=3, capacity=0.5)
    found = []
    for cuts in (None, recompute):
        model = Model(net(), (6,), recompute=cuts)
        trainer = Trainer(model, "sgd", progress=False)
        trainer.fit(ArrayDataset(x.astype("float32"), y), epochs=1, batch_size=8)
        found.append((trainer.losses, model.state()))
    assert found[0][0] == found[1][0]
    for name, array in found[0][1].items():
        np.testing.assert_array_equal(found[1][1][name], array, err_msg=name)


# -- bad input
