"""Layers of sequences (N, T, D): a class token, positional embeddings, and those of vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import (
    GELU,
    ClassToken,
    Dropout,
    LayerNorm,
    Linear,
    PositionalEmbedding,
    Residual,
    Sequential,
    StepContext,
)
from pydtnn.model import Model
from pydtnn.testing import check_layer
from tests.each import each


@each("shape", [(1, 1), (1, 5), (7, 3), (4, 33)])
@each("kind", [ClassToken, PositionalEmbedding])
def test_layers_of_sequences_keep_the_contract(
    kind: Any, shape: tuple[int, int], backend: Backend
) -> None:
    check_layer(kind(), shape, backend=backend)


def test_the_class_token_is_the_first_position(backend: Backend) -> None:
    model = Model(ClassToken(initializer="ones"), (3, 2), backend=backend)
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype("float32")
    y = model.predict(x)
    np.testing.assert_array_equal(y[:, 0], np.ones((4, 2)))
    np.testing.assert_array_equal(y[:, 1:], x)


def test_positional_embeddings_are_added_to_every_sample(backend: Backend) -> None:
    model = Model(PositionalEmbedding(), (3, 2), backend=backend, dtype="float64")
    x = np.random.default_rng(0).normal(size=(4, 3, 2))
    w = model.state()["positionalembedding.w"]
    assert (w != 0).all()
    np.testing.assert_array_equal(model.predict(x), x + w)


def test_weight_decay_leaves_out_tokens_and_embeddings() -> None:
    model = Model(Sequential(ClassToken(), PositionalEmbedding()), (3, 2), backend="numpy")
    assert not any(p.decay for p in model.parameters.values())


@each("kind", [ClassToken, PositionalEmbedding])
def test_frozen_vectors_have_no_gradients(kind: Any, backend: Backend) -> None:
    net = Sequential(Linear(4), kind(name="frozen"), Linear(2))
    model = Model(net, (3, 5), backend=backend)
    before = model.layers["frozen"].cost(2)
    model.freeze("frozen")
    assert model.layers["frozen"].cost(2).flops_backward < before.flops_backward
    x = np.ones((2, 3, 5), "float32")
    y, saved = model.forward(backend.asarray(x), StepContext(training=True))
    model.backward(y * 0 + 1, saved)
    assert (backend.to_numpy(model.parameters["linear0.w"].grad) != 0).any()


@each("kind", [ClassToken, PositionalEmbedding])
def test_an_input_that_is_no_sequence_is_told(kind: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}: expected an input of shape \(T, D\), got \(5,\)"
    ):
        Model(kind(), (5,), backend="numpy")


def mlp() -> Residual:
    return Residual(
        Sequential(LayerNorm(), Linear(7), GELU(), Dropout(0.4), Linear(5, bias=False)), name="r"
    )


def test_layers_of_vectors_compute_each_position_alone(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 6, 3, 5))
    sequences = Model(mlp(), (3, 5), backend=backend, dtype="float64", input_gradient=True)
    vectors = Model(mlp(), (5,), backend=backend, dtype="float64", input_gradient=True)
    vectors.load(sequences.state())
    context = StepContext(training=False)
    y, saved = sequences.forward(backend.asarray(x), context)
    dx = sequences.backward(backend.asarray(dy), saved)
    rows, saved = vectors.forward(backend.asarray(x.reshape(18, 5)), context)
    drows = vectors.backward(backend.asarray(dy.reshape(18, 5)), saved)
    for ours, expected in ((y, rows), (dx, drows)):
        ours, expected = backend.to_numpy(ours), backend.to_numpy(expected)
        np.testing.assert_allclose(ours, expected.reshape(ours.shape), rtol=1e-12, atol=1e-14)
    for name, p in sequences.parameters.items():
        expected = backend.to_numpy(vectors.parameters[name].grad)
        np.testing.assert_allclose(backend.to_numpy(p.grad), expected, rtol=1e-11, atol=1e-13)


def test_positions_are_dropped_independently(backend: Backend) -> None:
    model = Model(Dropout(0.5), (40, 50), backend=backend)
    x = np.ones((1, 40, 50), "float32")
    y, _ = model.forward(backend.asarray(x), StepContext(training=True, samples=np.arange(1)))
    assert len(np.unique(backend.to_numpy(y)[0], axis=0)) == 40
