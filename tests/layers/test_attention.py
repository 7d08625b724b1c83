"""Attention and its projections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import (
    Block,
    DotProductAttention,
    Linear,
    MultiHeadAttention,
    Sequential,
    StepContext,
)
from pydtnn.layers.blocks import Graph
from pydtnn.layers.node import Node
from pydtnn.model import Model
from pydtnn.testing import check_layer
from tests.each import each


@each(("heads", "shape"), [(1, (1, 3)), (1, (5, 9)), (2, (7, 6)), (3, (4, 18)), (2, (60, 30))])
@each("options", [{}, {"causal": True}, {"dropout": 0.3}])
def test_attention_keeps_the_contract(
    heads: int, shape: tuple[int, int], options: dict[str, Any], backend: Backend
) -> None:
    check_layer(DotProductAttention(heads, **options), shape, backend=backend)


def test_multi_head_attention_is_attention_between_two_linear_layers(backend: Backend) -> None:
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


def test_a_block_that_is_used_twice_shares_its_projections() -> None:
    attention = MultiHeadAttention(2, bias=False, name="a")
    model = Model(Sequential(attention, attention), (3, 4), backend="numpy", dtype="float64")
    assert set(model.parameters) == {"a.in_proj.w", "a.out_proj.w"}
    once = Model(MultiHeadAttention(2, bias=False, name="a"), (3, 4), backend="numpy")
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    twice = once.predict(once.predict(x))
    np.testing.assert_allclose(model.predict(x), twice, rtol=1e-5, atol=1e-6)


def test_a_permutation_of_the_positions_permutes_the_output(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    model = Model(MultiHeadAttention(3), (7, 6), backend=backend, dtype="float64")
    x, order = rng.normal(size=(2, 7, 6)), rng.permutation(7)
    np.testing.assert_allclose(
        model.predict(x[:, order]), model.predict(x)[:, order], rtol=1e-12, atol=1e-14
    )


def test_weights_are_dropped_in_training_only_and_by_sample(backend: Backend) -> None:
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


def test_dropout_without_samples_says_what_is_missing() -> None:
    model = Model(DotProductAttention(1, dropout=0.4), (2, 3), backend="numpy")
    with pytest.raises(ValueError, match="DotProductAttention: training requires the ids of the"):
        model.forward(np.ones((2, 2, 3), "float32"), StepContext(training=True))


@each(
    ("make", "shape", "sentence"),
    [
        (lambda: MultiHeadAttention(4), (5, 6), r"heads must divide the 6 features of .*\(5, 6\)"),
        (
            lambda: MultiHeadAttention(2),
            (6,),
            r"one input of shape \(T, D\), .*got \(6,\)",
        ),
        (
            lambda: DotProductAttention(2),
            (5, 9),
            r"of shape \(T, 3 D\) with D a multiple of heads=2",
        ),
        (lambda: MultiHeadAttention(0), (5, 6), "MultiHeadAttention: heads must be at least 1"),
        (lambda: DotProductAttention(1, dropout=1.0), (5, 6), "dropout must be at least 0 and"),
    ],
)
def test_options_that_do_not_fit_are_told(make: Any, shape: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Model(make(), shape, backend="numpy")


def test_causal_must_be_true_or_false() -> None:
    with pytest.raises(TypeError, match="MultiHeadAttention: causal must be true or false, got 1"):
        MultiHeadAttention(1, causal=1)  # type: ignore[arg-type]


class OfLengths(Block):
    """Attention of samples with lengths, the second input."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        super().__init__()
        self.attention = attention

    def wire(self, graph: Graph, *inputs: Node) -> Node:
        return graph.add(self.attention, *inputs)


def of_lengths(backend: Backend | str = "cpu", dtype: str = "float64", **options: Any) -> Model:
    net = OfLengths(MultiHeadAttention(2, name="a", **options))
    return Model(net, [(5, 4), (1,)], backend=backend, dtype=dtype, input_gradient=True)


LENGTHS = np.array([[3.0], [5.0], [0.0], [1.0]])


@each("causal", [False, True])
def test_samples_with_lengths_are_computed_as_shorter_ones(causal: bool, backend: Backend) -> None:
    model = of_lengths(backend, causal=causal)
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
        short = Model(net, (length, 4), backend=backend, dtype="float64", input_gradient=True)
        short.load(model.state())
        part = backend.asarray(x[n : n + 1, :length])
        own, kept = short.forward(part, StepContext(training=True))
        np.testing.assert_allclose(y[n, :length], backend.to_numpy(own)[0], rtol=1e-12, atol=1e-13)
        own_dx = short.backward(backend.asarray(dy[n : n + 1, :length]), kept)
        np.testing.assert_allclose(
            dx[n, :length], backend.to_numpy(own_dx)[0], rtol=1e-11, atol=1e-13
        )


@each("wrong", [6, -1, 2.5, np.nan])
def test_numbers_that_are_no_lengths_are_named_with_the_sample(wrong: float) -> None:
    lengths = LENGTHS.copy()
    lengths[2] = wrong
    context = StepContext(training=False, samples=np.array([7, 8, 30, 9]))
    with pytest.raises(ValueError, match=rf"in 0\.\.5, got {wrong:g} of sample 30"):
        of_lengths().forward((np.zeros((4, 5, 4)), lengths), context)


def test_a_model_of_16_bits_has_no_lengths() -> None:
    with pytest.raises(ValueError, match="float32 or float64, which represent all lengths, got bf"):
        of_lengths(dtype="bfloat16")


def test_a_second_input_must_be_lengths() -> None:
    with pytest.raises(ValueError, match=r"input must be lengths of shape \(1,\), got \(5,\)"):
        Model(OfLengths(MultiHeadAttention(2)), [(5, 4), (5,)], backend="numpy")
