"""Vectors of tokens, and logits from the same matrix."""

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from pydtnn.layers import Add, Block, Embedding, Linear, Sequential
from pydtnn.layers.base import StepContext
from pydtnn.model import Model
from pydtnn.saving import load, save_model
from tests.each import each

TOKENS = np.array([[3, 0, 3], [1, 3, 6]], "float64")


def tied(tokens=7, features=4):
    embedding = Embedding(tokens, features, tied=True)
    return Sequential(embedding, Linear(features), embedding)


def gradients(model, x, dy):
    y, saved = model.forward(x, StepContext(training=True))
    model.backward(dy, saved)
    return y, {name: p.grad.copy() for name, p in model.parameters.items()}


@each("backend", ["cpu", "numpy"])
def test_vectors_are_rows_and_their_gradients_sums_over_occurrences(backend, rng):
    model = Model(Embedding(7, 4), (3,), backend=backend, dtype="float64")
    w, dy = model.state()["embedding.w"], rng.normal(size=(2, 3, 4))
    y, found = gradients(model, TOKENS, dy)
    np.testing.assert_array_equal(y, w[TOKENS.astype(int)])
    expected = np.zeros((7, 4))
    np.add.at(expected, TOKENS.astype(int), dy)
    np.testing.assert_allclose(found["embedding.w"], expected, rtol=1e-14, atol=1e-15)


def test_a_tied_layer_adds_the_gradients_of_both_uses(rng):
    model = Model(tied(), (3,), backend="cpu", dtype="float64")
    assert sorted(model.parameters) == ["embedding0.w", "linear1.b", "linear1.w"]
    dy, eps = rng.normal(size=(2, 3, 7)), 1e-6
    w = model.parameters["embedding0.w"].master
    _, found = gradients(model, TOKENS, dy)

    def loss():
        return float((model.predict(TOKENS) * dy).sum())

    direction, kept, losses = rng.normal(size=w.shape), w.copy(), []
    for step in (eps, -eps):
        w[...] = kept + step * direction
        losses.append(loss())
    slope = (found["embedding0.w"] * direction).sum()
    assert slope == pytest.approx((losses[0] - losses[1]) / (2 * eps), abs=1e-8)


def test_a_second_sequence_has_vectors_and_logits_have_a_bias(rng):
    class Both(Block):
        def wire(self, graph, *inputs):
            embedding = Embedding(7, 4, tied=True, bias=True, name="token")
            x, y = (graph.add(embedding, node) for node in inputs)
            return graph.add(embedding, graph.add(Add(), x, y))

    model = Model(Both(), [(3,), (3,)], backend="cpu", dtype="float64")
    other, dy = TOKENS[:, ::-1].copy(), rng.normal(size=(2, 3, 7))
    model.load({name: rng.normal(size=array.shape) for name, array in model.state().items()})
    y, found = gradients(model, (TOKENS, other), dy)
    w, b = (model.state()[f"token.{name}"] for name in "wb")
    x, z = TOKENS.astype(int), other.astype(int)
    np.testing.assert_allclose(y, (w[x] + w[z]) @ w.T + b, rtol=1e-13)
    np.testing.assert_allclose(found["token.b"], dy.sum(axis=(0, 1)), rtol=1e-13)
    expected = np.einsum("ntk,ntc->kc", dy, w[x] + w[z])
    for tokens in (x, z):
        np.add.at(expected, tokens, dy @ w)
    np.testing.assert_allclose(found["token.w"], expected, rtol=1e-12)


def test_a_saved_model_is_tied_again(tmp_path):
    model = Model(tied(), (3,), backend="cpu", dtype="float64")
    save_model(model, tmp_path / "saved")
    again = load(tmp_path / "saved", backend="cpu")
    np.testing.assert_array_equal(again.predict(TOKENS), model.predict(TOKENS))
    assert sorted(again.parameters) == sorted(model.parameters)


@each("wrong", [7, -1, 0.5, np.nan])
def test_numbers_that_are_no_tokens_are_named_with_sample_and_position(wrong):
    model = Model(Embedding(7, 4), (3,), backend="cpu", dtype="float64")
    x = TOKENS.copy()
    x[1, 2] = wrong
    context = StepContext(training=True, samples=np.array([30, 41]))
    message = rf"in 0\.\.6, got {wrong:g} at position 2 of sample 41"
    with pytest.raises(ValueError, match=message):
        model.forward(x, context)


@each("dtype", ["float32", "float64"])
@each(("rows", "count", "columns"), [(0, 3, 5), (1, 1, 1), (37, 5, 61), (300, 7, 130)])
@each("accumulate", [False, True])
@each("threads", [1, 3])
def test_rows_are_added(rows, count, columns, dtype, accumulate, threads, rng):
    dy = rng.normal(size=(rows, columns)).astype(dtype)
    chosen = rng.integers(0, count, rows)
    outs = []
    for name in ("cpu", "numpy"):
        out = np.full((count, columns), 0.25, dtype)
        backend = create_backend(name, threads=threads)
        backend.linear.add_rows(dy, chosen, out=out, accumulate=accumulate)
        outs.append(out)
    tolerance = 20 * np.finfo(dtype).eps
    np.testing.assert_allclose(*outs, rtol=tolerance, atol=tolerance * rows**0.5)


def test_rows_outside_the_matrix_are_refused(rng):
    linear = create_backend("cpu", threads=1).linear
    with pytest.raises(IndexError, match=r"rows must be in 0\.\.4, got 5"):
        linear.add_rows(np.ones((2, 3)), np.array([0, 5]), out=np.zeros((5, 3)))
