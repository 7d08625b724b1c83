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


@each("return_sequences", [True, False])
@each("states", [True, False])
@each("kind", STACKS)
def test_a_sample_with_a_length_has_the_outputs_and_gradients_of_its_part_alone(
    kind, states, return_sequences
):
    """With states, one of length 0 ends with those with which it begins."""
    lengths, count, rng = [7, 3, 1, 5, 0], 4 * kind.kind.carried * states, np.random.default_rng(0)
    x, (first, dends) = rng.normal(size=(5, 7, 3)), rng.normal(size=(2, count, 5, 4))
    options = {"return_sequences": return_sequences, "return_states": states, "name": "a"}

    def run(steps: int, rows: slice, *lengths: np.ndarray) -> tuple[list[np.ndarray], ...]:
        shapes = [(steps, 3), *[(1,)] * len(lengths), *[(4,)] * count]
        net = kind(4, layers=2, bidirectional=True, **options)
        model = Model(net, shapes, dtype="float64", input_gradient=True)
        xs = (x[rows, :steps], *lengths, *first[:, rows])
        y, saved = model.forward(xs if len(xs) > 1 else xs[0], StepContext(training=True))
        y, *ends = y if states else (y,)
        dy = np.ones_like(y)
        dxs = model.backward((dy, *dends[:, rows]) if states else dy, saved)
        dx, *others = dxs if len(xs) > 1 else (dxs,)
        others = [*ends, *others[len(lengths) :]]
        return [y, dx], others, [p.grad.copy() for p in model.parameters.values()]

    steps, ends, grads = run(7, slice(5), np.reshape(lengths, (5, 1)).astype(float))
    kept = ends[: None if return_sequences else count]
    np.testing.assert_array_equal(
        [end[4] for end in kept], [*first[:, 4], *dends[:, 4]][: len(kept)]
    )
    for n, length in enumerate(lengths[:4]):
        own_steps, own_ends, own = run(length, slice(n, n + 1))
        grads = [grad - part for grad, part in zip(grads, own, strict=True)]
        for found, expected in zip((*steps, *ends), (*own_steps, *own_ends), strict=True):
            assert found.ndim == 2 or not found[n, length:].any()
            part = found[n, :length] if found.ndim == 3 else found[n]
            np.testing.assert_allclose(part, expected[0], atol=1e-14)
    assert max(abs(grad).max() for grad in grads) < 1e-13


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
    """A linear layer of the sequence, which a plan cuts, beside lengths and states."""

    def wire(self, graph: GraphBuilder, *inputs: Node) -> Outputs:
        return graph.add(Linear(6), inputs[0]), *inputs[1:]


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
