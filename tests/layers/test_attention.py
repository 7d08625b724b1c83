"""Attention and its projections."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.layers import DotProductAttention, Linear, MultiHeadAttention, Sequential, StepContext
from pydtnn.model import Model
from tests.each import each


def test_multi_head_attention_is_attention_between_two_linear_layers(backend):
    x = np.random.default_rng(0).normal(size=(3, 5, 8))
    ours = Model(MultiHeadAttention(2, causal=True, name="a"), (5, 8), backend=backend)
    by_hand = Sequential(
        Linear(24, name="in_proj"), DotProductAttention(2, causal=True), Linear(8, name="out_proj")
    )
    other = Model(by_hand, (5, 8), backend=backend)
    other.load({name.removeprefix("a."): value for name, value in ours.state().items()})
    names = {"a.in_proj.w", "a.in_proj.b", "a.out_proj.w", "a.out_proj.b"}
    assert set(ours.parameters) == names
    np.testing.assert_array_equal(ours.predict(x), other.predict(x))


def test_weights_are_dropped_in_training_only_and_by_sample(backend):
    net = DotProductAttention(2, dropout=0.5)
    model = Model(net, (6, 12), backend=backend, dtype="float64")
    x = np.random.default_rng(0).normal(size=(4, 6, 12))

    def output(rows: slice, **context: Any) -> np.ndarray:
        settings = StepContext(samples=np.arange(4)[rows], **context)
        return backend.to_numpy(model.forward(backend.asarray(x[rows]), settings)[0])

    training = output(slice(None), training=True)
    np.testing.assert_array_equal(output(slice(2, 4), training=True), training[2:])
    assert (output(slice(None), training=True, epoch=1) != training).any()
    np.testing.assert_allclose(output(slice(None), training=False), model.predict(x), rtol=1e-12)
    assert (model.predict(x) != training).any()


LENGTHS = np.array([[3.0], [5.0], [0.0], [1.0]])


@each("causal", [False, True])
def test_samples_with_lengths_are_computed_as_shorter_ones(causal, backend):
    net = MultiHeadAttention(2, causal=causal, name="a")
    options: Any = {"backend": backend, "dtype": "float64", "input_gradient": True}
    model = Model(net, [(5, 4), (1,)], **options)
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(4, 5, 4)), rng.normal(size=(4, 5, 4))
    context = StepContext(training=True)
    y, saved = model.forward((backend.asarray(x), backend.asarray(LENGTHS)), context)
    dx, dlengths = model.backward(backend.asarray(dy), saved)
    y, dx = backend.to_numpy(y), backend.to_numpy(dx)
    assert not backend.to_numpy(dlengths).any()
    for n, length in enumerate(LENGTHS[:, 0].astype(int)):
        bias = np.broadcast_to(model.state()["a.out_proj.b"], y[n, length:].shape)
        np.testing.assert_allclose(y[n, length:], bias, rtol=0, atol=1e-15)
        np.testing.assert_array_equal(dx[n, length:], 0)
        if length == 0:
            continue
        net = MultiHeadAttention(2, causal=causal, name="a")
        short = Model(net, (length, 4), **options)
        short.load(model.state())
        part = backend.asarray(x[n : n + 1, :length])
        own, kept = short.forward(part, StepContext(training=True))
        np.testing.assert_allclose(y[n, :length], backend.to_numpy(own)[0], rtol=1e-12, atol=1e-13)
        own_dx = short.backward(backend.asarray(dy[n : n + 1, :length]), kept)
        np.testing.assert_allclose(
            dx[n, :length], backend.to_numpy(own_dx)[0], rtol=1e-11, atol=1e-13
        )
