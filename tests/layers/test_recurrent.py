"""Recurrent layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.layers import (
    GRU,
    LSTM,
    GRULayer,
    Linear,
    Net,
    Sequential,
    StepContext,
)
from pydtnn.layers.blocks import Block, GraphBuilder
from pydtnn.layers.node import Node, Outputs
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


class Widened(Block):
    """Linear layers of the sequence, of lengths of samples, and of states that are no lengths."""

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
        x, lengths, *states = inputs
        return (
            graph.add(Linear(6), x),
            lengths,
            *(graph.add(Linear(4, name=f"s{i}"), state) for i, state in enumerate(states)),
        )


@each("kind", STACKS)
def test_parts_of_a_sequence_whose_states_are_carried_are_the_whole_sequence(kind):
    (x, *states), count = np.random.default_rng(0).normal(size=(5, 3, 8, 4)), 2 * kind.kind.carried
    states = [state[:, 0] for state in states[:count]]

    def run(x: np.ndarray, *states: np.ndarray) -> Any:
        net, shapes = kind(4, layers=2, return_states=True, name="a"), [(x.shape[1], 4)]
        model = Model(net, shapes + [(4,)] * count, dtype="float64", backend="numpy")
        return model.predict((x, *states))

    (first, *between), (whole, *ends) = run(x[:, :3], *states), run(x, *states)
    second, *last = run(x[:, 3:], *between)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=1e-12)
    np.testing.assert_allclose(last, ends, rtol=1e-12)


@each("kind", STACKS)
def test_a_sample_with_a_length_begins_and_ends_with_its_own_states(kind):
    """One of length 0 ends with the states with which it begins."""
    lengths, count = np.array([5, 2, 0]), 2 * kind.kind.carried
    rng, options = np.random.default_rng(0), {"bidirectional": True, "return_states": True}
    x, states = rng.normal(size=(3, 5, 2)), rng.normal(size=(count, 3, 4))
    dends, settings = rng.normal(size=(count, 3, 4)), {"dtype": "float64", "input_gradient": True}

    def run(steps: int, rows: slice, *lengths: np.ndarray) -> Any:
        shapes = [(steps, 2), *[(1,)] * len(lengths), *[(4,)] * count]
        model = Model(kind(4, **options), shapes, **settings)
        xs = (x[rows, :steps], *lengths, *states[:, rows])
        (y, *ends), saved = model.forward(xs, StepContext(training=True))
        dx, *others = model.backward((np.ones_like(y), *dends[:, rows]), saved)
        return [y, dx, *ends, *others[len(lengths) :]]

    found = run(5, slice(3), lengths[:, None].astype(float))
    for n in range(2):
        alone = run(int(lengths[n]), slice(n, n + 1))
        for ours, expected in zip(found, alone, strict=True):
            cut = ours[n : n + 1, : lengths[n]] if ours.ndim == 3 else ours[n : n + 1]
            np.testing.assert_allclose(cut, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal([end[2] for end in found[2 : 2 + count]], states[:, 2])
    np.testing.assert_array_equal([dh[2] for dh in found[2 + count :]], dends[:, 2])


@each(
    ("kind", "mesh"),
    [(LSTM, {"data": 3}), (GRU, {"filter": 2}), (GRU, {"context": 2}), (LSTM, {"pipeline": 2})],
)
def test_ranks_train_with_states_as_one_does(kind, mesh):
    def net() -> Net:
        return Sequential(Widened(), kind(4, bidirectional=True, return_states=True))

    count = 2 * kind.kind.carried
    plan = next(iter({*mesh} - {"data"}), None)
    check_plan(net, [(4, 6), (1,), *[(4,)] * count], plan=plan, meshes=[mesh])


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
