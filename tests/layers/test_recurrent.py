"""Recurrent layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.layers import GRU, LSTM, GRULayer, Linear, Net, Sequential, StepContext
from pydtnn.model import Model
from pydtnn.tools.testing import check_plan
from tests.each import each

STACKS = [LSTM, GRU]


def passes(model: Model, *xs: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Outputs, and the gradients of x and of the parameters for a gradient of ones."""
    y, saved = model.forward(xs if len(xs) > 1 else xs[0], StepContext(training=False))
    dx = model.backward(np.ones_like(y), saved)
    grads = {name: p.grad.copy() for name, p in model.parameters.items()}
    return y, dx[0] if len(xs) > 1 else dx, grads


@each("return_sequences", [True, False])
@each("kind", STACKS)
def test_a_sample_with_a_length_has_the_outputs_and_gradients_of_its_part_alone(
    kind, return_sequences
):
    def make() -> Any:
        options = {"bidirectional": True, "return_sequences": return_sequences, "name": "a"}
        return kind(4, layers=2, **options)

    x = np.random.default_rng(0).normal(size=(4, 7, 3))
    lengths = np.array([[7.0], [3], [1], [5]])
    options: dict[str, Any] = {"dtype": "float64", "input_gradient": True}
    y, dx, grads = passes(Model(make(), [(7, 3), (1,)], **options), x, lengths)
    sums = dict.fromkeys(grads, 0.0)
    for n, length in enumerate(lengths[:, 0].astype(int)):
        alone = Model(make(), (length, 3), **options)
        (expected,), (expected_dx,), own = passes(alone, x[n : n + 1, :length])
        sums = {name: sums[name] + own[name] for name in own}
        assert not dx[n, length:].any()
        np.testing.assert_allclose(dx[n, :length], expected_dx, atol=1e-14)
        if return_sequences:
            assert not y[n, length:].any()
            np.testing.assert_allclose(y[n, :length], expected, atol=1e-14)
        else:
            np.testing.assert_allclose(y[n], expected, atol=1e-14)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, sums[name], atol=1e-13)


@each("kind", STACKS)
def test_layers_and_directions_are_those_that_their_layers_compute(kind):
    net = kind(4, layers=2, bidirectional=True, return_sequences=False, dropout=0.5, name="a")
    model = Model(Sequential(net), (5, 3), dtype="float64")
    names = [layer.name for layer in model.layers]
    assert names == [
        *("a.layer0", "a.layer0_reverse", "a.concat0", "a.dropout0"),
        *("a.layer1", "a.layer1_reverse", "a.concat1"),
    ]
    assert model.output_shape == (8,)
    limit = 4**-0.5
    values = np.concatenate([p.master.ravel() for p in model.parameters.values()])
    assert 0.95 * limit < abs(values).max() <= limit  # uniform, as in PyTorch


def small() -> list[Net]:
    return [LSTM(5, bidirectional=True), GRU(4, return_sequences=False), Linear(3)]


@each("plan", [None, "filter"])
def test_ranks_train_as_one_does(plan):
    meshes = [{"data": 3}] if plan is None else [{"filter": 2}]
    check_plan(small, (4, 3), plan=plan, meshes=meshes)


def test_a_plan_that_cuts_units_is_refused():
    with pytest.raises(ValueError, match="LSTMLayer cannot be partitioned by filter"):
        check_plan(small, (4, 3), plan={"*.layer0": {"filter": "filter"}}, meshes=[{"filter": 2}])


def test_lengths_of_examples_are_from_1_to_that_of_the_sequence(rng):
    (layer,) = Model(GRULayer(2), [(5, 3), (1,)], backend="numpy").layers
    assert {*layer.example((100, 1), rng).reshape(-1)} == {1, 2, 3, 4, 5}
