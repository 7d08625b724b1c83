"""Attention and its projections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.layers import (
    CrossAttention,
    DotProductAttention,
    Linear,
    LinearBiases,
    MultiHeadAttention,
    RelativePositions,
    Sequential,
    StepContext,
)
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


def test_documents_of_a_packed_sequence_are_computed_as_samples_of_their_own(backend):
    options: Any = {"backend": backend, "dtype": "float64", "input_gradient": True}

    def net() -> MultiHeadAttention:
        return MultiHeadAttention(2, causal=True, window=3, name="a")

    ids = np.array([[1, 1, 1, 1, 7, 7, 0, 3], [0, 0, 2, 2, 2, 2, 2, 2]], float)
    model = Model(net(), [(8, 4), (8,)], **options)
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 8, 4)), rng.normal(size=(2, 8, 4))
    arrays = backend.asarray(x), backend.asarray(ids)
    y, saved = model.forward(arrays, StepContext(training=True))
    dx, dids = (backend.to_numpy(d) for d in model.backward(backend.asarray(dy), saved))
    assert not dids.any()
    for n, document in [(0, 1), (0, 7), (0, 3), (1, 2)]:
        part = ids[n] == document
        alone = Model(net(), (part.sum(), 4), **options)
        alone.load(model.state())
        own, kept = alone.forward(backend.asarray(x[n : n + 1, part]), StepContext(training=True))
        own_dx = alone.backward(backend.asarray(dy[n : n + 1, part]), kept)
        for whole, other in ((backend.to_numpy(y), own), (dx, own_dx)):
            expected = backend.to_numpy(other)[0]
            np.testing.assert_allclose(whole[n, part], expected, rtol=1e-11, atol=1e-13)
    assert not dx[ids == 0].any()


def test_a_document_in_two_pieces_is_named(backend):
    model = Model(DotProductAttention(1, name="a"), [(4, 3), (4,)], backend=backend)
    ids = np.array([[1, 1, 2, 2], [5, 0, 5, 0]])
    with pytest.raises(ValueError, match=r"positions of document 5 of row 1 .* not next to"):
        model.predict((np.zeros((2, 4, 3)), ids))


def test_slopes_of_linear_biases_are_those_of_the_paper():
    eight = 0.5 ** np.arange(1, 9)
    np.testing.assert_array_equal(LinearBiases().slopes(8), eight)
    six = [*0.25 ** np.arange(1, 5), 0.5, 0.125]  # of 4, and every second one of 8
    np.testing.assert_allclose(LinearBiases().slopes(6), six, rtol=1e-15)


def test_relative_positions_have_exact_buckets_near_and_logarithmic_ones_far():
    both_ways = RelativePositions(8, 16).bucket(np.array([-40, -9, -3, -1, 0, 1, 2, 5, 40]))
    # half for each direction, of which 2 are exact: 2 + log(d / 2) / log(16 / 2) 2
    np.testing.assert_array_equal(both_ways, [3, 3, 2, 1, 0, 5, 6, 6, 7])
    back = RelativePositions(8, 16, bidirectional=False).bucket(np.array([3, 0, -3, -5, -15, -99]))
    np.testing.assert_array_equal(back, [0, 0, 3, 4, 7, 7])


def test_cross_attention_with_all_keys_of_the_own_sequence_is_self_attention(backend):
    rng = np.random.default_rng(0)
    qkv, lengths = rng.normal(size=(3, 6, 12)), np.array([[4.0], [6.0], [1.0]])
    options: Any = {"backend": backend, "dtype": "float64"}
    cross = Model(CrossAttention(2), [(6, 4), (6, 8), (1,)], **options)
    y = cross.predict((qkv[..., :4], qkv[..., 4:], lengths))
    whole = Model(DotProductAttention(2), [(6, 12), (1,)], **options).predict((qkv, lengths))
    for n, length in enumerate(lengths[:, 0].astype(int)):
        np.testing.assert_allclose(y[n, :length], whole[n, :length], rtol=1e-12)
