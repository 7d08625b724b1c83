"""The forward loop, the backward loop, and what a model keeps."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from pydtnn import layers as nn
from pydtnn.kernels import Backend
from pydtnn.layers.parameters import Bucket
from pydtnn.model import Model
from pydtnn.model.graph import Node
from tests.each import each

SHAPE = (6, 6, 3)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(4, 3, padding=1),
        nn.BatchNorm(),
        nn.ReLU(),
        nn.Residual(nn.Sequential(nn.Conv2d(4, 3, padding=1), nn.ReLU())),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(5),
    )


def build(backend: Backend | str = "numpy", **options: Any) -> Model:
    return Model(net(), SHAPE, **{"backend": backend, "dtype": "float64", **options})


def batch(size: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray, nn.StepContext]:
    rng = np.random.default_rng(seed)
    context = nn.StepContext(training=True, samples=np.arange(size))
    return rng.normal(size=(size, *SHAPE)), rng.normal(size=(size, 5)), context


def gradients(model: Model) -> dict[str, np.ndarray]:
    to_numpy = model.backend.to_numpy
    return {name: to_numpy(p.grad).copy() for name, p in model.parameters.items()}


def test_gradients_of_a_whole_model_are_those_of_central_differences(backend):
    model = build(backend, input_gradient=True)
    x, dy, context = batch()
    x = backend.asarray(x)
    _, residuals = model.forward(x, context)
    dx = model.backward(dy, residuals)
    slopes = {**gradients(model), "x": backend.to_numpy(dx)}
    arrays = {**{name: p.master for name, p in model.parameters.items()}, "x": x}
    rng = np.random.default_rng(1)
    for name, array in arrays.items():
        direction, before = rng.normal(size=array.shape), array.copy()
        losses = []
        for step in (1e-6, -1e-6):
            array[...] = before + backend.asarray(step * direction)
            losses.append(float((backend.to_numpy(model.forward(x, context)[0]) * dy).sum()))
        array[...] = before
        measured = (losses[0] - losses[1]) / 2e-6
        # rounding of the losses, 1e-15, divided by the step; batch norm cancels the bias before it
        assert measured == pytest.approx((slopes[name] * direction).sum(), rel=1e-5, abs=1e-7)


def test_two_batches_can_be_in_flight(backend):
    model = build(backend)
    batches = [batch(4, seed=1), batch(3, seed=2)]
    alone = []
    for x, dy, context in batches:
        _, residuals = model.forward(x, context)
        model.backward(dy, residuals)
        alone.append(gradients(model))
    passes = [model.forward(x, context)[1] for x, _, context in batches]
    for (_, dy, _), residuals, want in zip(batches, passes, alone, strict=True):
        model.backward(dy, residuals)
        for name, grad in gradients(model).items():
            np.testing.assert_allclose(grad, want[name], rtol=1e-12, atol=1e-14)


def test_a_batch_without_samples_gives_gradients_of_zero(backend):
    model = build(backend)
    for grads in (b.grads for b in model.buckets):
        grads[...] = 7
    x, dy, context = batch(0)
    y, residuals = model.forward(x, context)
    assert y.shape == (0, 5)
    model.backward(dy, residuals)
    assert all((grad == 0).all() for grad in gradients(model).values())


def test_buckets_are_reported_in_order_each_as_soon_as_it_is_complete():
    model = build(bucket_bytes=512)
    assert len(model.buckets) > 2
    x, dy, context = batch()
    _, residuals = model.forward(x, context)
    model.backward(dy, residuals)
    final = {b.index: b.grads.copy() for b in model.buckets}
    for b in model.buckets:
        b.grads[...] = np.nan
    _, residuals = model.forward(x, context)
    log: list[Any] = []

    def on_ready(bucket: Bucket, shard: int) -> None:
        assert shard == 0
        for entry in bucket.parameters:  # the padding has no gradient
            part = entry.slice
            np.testing.assert_array_equal(bucket.grads[part], final[bucket.index][part])
        log.append(bucket)

    model.backward(dy, residuals, on_ready=on_ready, after_node=lambda node: log.append(node.index))
    assert [b for b in log if isinstance(b, Bucket)] == list(model.buckets)
    for bucket in model.buckets:  # after the node before it, before the end of its own
        before, after = log[: log.index(bucket)], log[log.index(bucket) :]
        assert bucket.ready_at not in before
        assert next(entry for entry in after if isinstance(entry, int)) == bucket.ready_at
    assert [i for i in log if isinstance(i, int)] == [n.index for n in model.graph.nodes[:0:-1]]


def test_a_forward_pass_alone_frees_every_array_after_its_last_use():
    model = build()
    x, _, context = batch()
    refs: dict[int, weakref.ref] = {}
    alive: list[int] = []
    seen: list[tuple[str, tuple[int, ...]]] = []

    def watch(node: Node, y: np.ndarray) -> None:
        refs[node.index] = weakref.ref(y)
        seen.append((node.name, y.shape[1:]))
        alive.append(len({id(ref()) for ref in refs.values() if ref() is not None}))

    _, residuals = model.forward(x, context, keep=False, after_node=watch)
    # the residual's input is alive together with the body's arrays; elsewhere one after the other
    assert max(alive) <= 3
    assert [i for i, ref in refs.items() if ref() is not None] == [model.graph.outputs[0].index]
    assert residuals == [None] * len(model.graph.nodes)
    assert seen == [(node.name, node.shape) for node in model.graph.nodes[1:]]


def test_backward_frees_what_forward_kept_as_it_goes():
    model = build()
    x, dy, context = batch()
    refs: dict[int, weakref.ref] = {}
    residuals = model.forward(
        x, context, after_node=lambda node, y: refs.update({node.index: weakref.ref(y)})
    )[1]
    kept = {i for i, ref in refs.items() if ref() is not None}
    assert len(kept) > 3
    counts = []

    def count(node: Node) -> None:
        counts.append(sum(refs[i]() is not None for i in kept))

    model.backward(dy, residuals, after_node=count)
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0
    assert residuals == [None] * len(model.graph.nodes)


class Squared(nn.Layer):
    """Notes the gradients that it returns."""

    def __init__(self, gradients: list[weakref.ref]) -> None:
        super().__init__()
        self.gradients = gradients

    def forward(self, *xs: np.ndarray, context: nn.StepContext) -> tuple[np.ndarray, np.ndarray]:
        return xs[0] ** 2, xs[0]

    def backward(self, dy: np.ndarray, saved: np.ndarray) -> np.ndarray:
        dx = 2 * saved * dy
        self.gradients.append(weakref.ref(dx))
        return dx


def test_backward_frees_every_gradient_after_its_last_use():
    gradients: list[weakref.ref] = []
    body = nn.Sequential(Squared(gradients), Squared(gradients))
    chain = [Squared(gradients) for _ in range(3)]
    net = nn.Sequential(nn.Linear(3), *chain, nn.Residual(body), Squared(gradients))
    model = Model(net, (3,), backend="numpy")
    y, residuals = model.forward(np.ones((2, 3), "float32"), nn.StepContext(training=True))
    alive = []

    def count(node: Node) -> None:
        alive.append(sum(ref() is not None for ref in gradients))

    model.backward(np.ones_like(y), residuals, after_node=count)
    # one, or beside the body of a residual two, whose sum is another array
    assert alive == [1, 1, 2, 0, 1, 1, 1, 0]


def test_predict_does_not_depend_on_the_batch_size(backend):
    model = build(backend)
    x = batch(7)[0]
    whole = model.predict(x)
    assert whole.dtype == np.float64
    np.testing.assert_allclose(model.predict(x, batch_size=3), whole, rtol=1e-12, atol=1e-14)
    integers = (9 * x).astype(np.int16)
    before = integers.copy()
    assert model.predict(integers).dtype == np.float64
    np.testing.assert_array_equal(integers, before)
    assert model.predict(x[:0]).shape == (0, 5)


@each(
    ("given", "sentence"),
    [
        ((2, 6, 6, 1), r"expected an array of shape \(n, 6, 6, 3\), got \(2, 6, 6, 1\)$"),
        ((2, 3, 6, 6), r"expected .*, got \(2, 3, 6, 6\); use x\.transpose\(0"),
        ((6, 6, 3), r"expected an array of shape \(n, 6, 6, 3\), got \(6, 6, 3\); use x\[None\]"),
        ((), r"expected an array of shape \(n, 6, 6, 3\), got \(\)$"),
    ],
)
def test_predict_refuses_samples_of_another_shape(given, sentence):
    model = build()
    with pytest.raises(ValueError, match=r"Model\.predict: " + sentence):
        model.predict(np.zeros(given))
    with pytest.raises(ValueError, match="Model: " + sentence):
        model.forward(np.zeros(given), nn.StepContext(training=True))
    with pytest.raises(ValueError, match=r"Model\.predict: batch_size must be at least 1, got 0"):
        build().predict(np.zeros((2, *SHAPE)), batch_size=0)


def test_parameters_depend_on_the_seed_which_is_0():
    models = [Model(nn.Linear(3), (2,), **options) for options in ({}, {"seed": 0}, {"seed": 1})]
    first, same, other = (next(iter(model.parameters.values())).value for model in models)
    assert (first == same).all()
    assert (first != other).all()


@each(("shape", "warns"), [((3, 24, 24), True), ((3, 23, 23), False), ((24, 24, 3), False)])
def test_channels_that_may_have_been_put_first_are_warned_of(shape, warns):
    with pytest.warns(match="means an image of 3 x 24 pixels") if warns else nullcontext():
        Model(nn.Conv2d(2, 3), shape)


def test_predict_takes_a_tuple_for_several_inputs():
    model = Model(nn.Concat(), [(2,), (3,)], backend="numpy")
    assert model.predict((np.zeros((4, 2)), np.zeros((4, 3))), batch_size=3).shape == (4, 5)
    with pytest.raises(ValueError, match=r"got \(4, 2\) and \(5, 3\)"):
        model.predict((np.zeros((4, 2)), np.zeros((5, 3))))


def test_weights_that_do_not_fit_are_listed_and_nothing_changes():
    model = build()
    before = {name: array.copy() for name, array in model.state().items()}
    state = {name: array + 1 for name, array in before.items()}
    state["linear7.w"] = np.zeros((5, 7))
    del state["conv2d0.b"]
    state["extra.w"] = np.zeros(3)
    sentence = (
        "weights do not fit the model: conv2d0.b is missing, extra.w is unknown, "
        r"linear7.w has shape \(5, 7\) instead of \(5, 36\)$"
    )
    with pytest.raises(ValueError, match=sentence):
        model.load(state)
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, before[name])


def test_weights_of_another_network_are_told_by_their_number():
    other = {f"{name}{i}": np.zeros((2, 3)) for i in range(3) for name in ("w", "b")}
    other["norm.running_mean"] = np.zeros(2)
    words = (
        r"weights do not fit the model: they are of another network, with 36 parameters in 6 "
        r"arrays, got [\d,]+ parameters in \d+ arrays; create the network with which they were "
    )
    with pytest.raises(ValueError, match=words):
        build().load(other)


@each(
    ("shape", "options", "words"),
    [
        ((0, 3), {}, r"input_shape must be positive ints, got \(0, 3\)"),
        (784, {}, r"input_shape must be a tuple, got 784; use \(784,\)"),
        ((None, 5), {}, r"input_shape must be positive ints, got \(None, 5\)"),
        ((5.5,), {}, "input_shape must be positive ints"),
        ("5", {}, "input_shape must be positive ints, got '5'"),
        ((2,), {"dtype": "float8"}, "dtype must be one of float32, .*, float16, got float8"),
        ((2,), {"seed": -3}, "seed must be at least 0, got -3"),
        ((2,), {"seed": "1"}, "seed must be a whole number, got '1'"),
        ((2,), {"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
    ],
)
def test_shapes_and_options_out_of_range_are_refused(shape, options, words):
    with pytest.raises((TypeError, ValueError), match=f"Model: {words}"):
        Model(nn.Linear(3), shape, backend="numpy", **options)


def test_a_gradient_of_another_shape_than_the_output_is_told():
    model = Model(nn.Linear(4), (3,), backend="numpy")
    y, residuals = model.forward(np.zeros((2, 3)), nn.StepContext(training=True))
    with pytest.raises(ValueError, match=r"expected a gradient of shape \(n, 4\), .* \(4, 2\)"):
        model.backward(y.T, residuals)


class Wrong(nn.ReLU):
    """A layer of a user's own whose passes do not return what they should."""

    def __init__(self, **results: Any) -> None:
        super().__init__()
        self.results = results

    def forward(self, *xs: Any, context: nn.StepContext) -> Any:
        return self.results.get("forward", super().forward(*xs, context=context))

    def backward(self, dy: Any, saved: Any) -> Any:
        return self.results.get("backward", super().backward(dy, saved))


@each(
    ("results", "words"),
    [
        ({"forward": np.zeros((2, 4))}, r"a pair \(output, saved\), got ndarray"),
        ({"forward": (None, None)}, r"2 outputs of shape \(4,\), .*, got NoneType"),
        ({"forward": (np.zeros((4, 2)), None)}, r".* got shape \(4, 2\)"),  # of the same size
        ({"forward": (np.zeros((1, 4)), None)}, r"2 outputs .* got shape \(1, 4\)"),
        ({"backward": None}, r".* \(4,\) .* got None"),
        ({"backward": np.zeros((1, 3))}, r".* \(4,\) .* got shape \(1, 3\)"),
    ],
)
def test_a_pass_that_breaks_its_promise_is_named(results, words):
    model = Model(
        nn.Sequential(nn.Linear(4), Wrong(**results), nn.Linear(3)), (2,), backend="numpy"
    )

    def step() -> None:
        y, residuals = model.forward(np.ones((2, 2)), nn.StepContext(training=True))
        model.backward(y, residuals)

    (failing,) = results
    with pytest.raises((TypeError, ValueError), match=f"{failing} of Wrong must return {words}"):
        step()
