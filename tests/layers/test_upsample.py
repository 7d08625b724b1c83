"""Layers that enlarge images: transposed convolution and interpolation."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import (
    Conv2d,
    ConvTranspose2d,
    Flatten,
    Layer,
    Linear,
    ReLU,
    Sequential,
    StepContext,
    Upsample,
)
from pydtnn.model import Model
from pydtnn.testing import check_layer, check_plan
from tests.each import each

CASES: dict[str, tuple[Callable[[], Layer], tuple[int, ...]]] = {
    "1x1": (lambda: ConvTranspose2d(3, 1), (3, 2, 2)),
    "stride 2": (lambda: ConvTranspose2d(2, 2, stride=2), (3, 4, 3)),
    "stride and output padding": (
        lambda: ConvTranspose2d(3, (3, 4), stride=(3, 2), padding=1, output_padding=(2, 1)),
        (2, 3, 2),
    ),
    "uneven padding": (lambda: ConvTranspose2d(2, 3, padding=((0, 2), (1, 0))), (3, 3, 2)),
    "dilation": (lambda: ConvTranspose2d(2, 2, dilation=(2, 3), bias=False), (2, 3, 2)),
    "groups": (lambda: ConvTranspose2d(6, 3, stride=2, groups=2, padding=1), (2, 3, 4)),
    "depthwise": (lambda: ConvTranspose2d(3, 2, stride=2, groups=3), (2, 3, 3)),
    "stride beyond the kernel": (lambda: ConvTranspose2d(2, 1, stride=3), (2, 3, 2)),
    "one pixel": (lambda: ConvTranspose2d(2, 4), (1, 1, 3)),
    "nearest": (lambda: Upsample(2), (2, 3, 3)),
    "nearest, uneven": (lambda: Upsample((1, 3)), (2, 1, 2)),
    "bilinear": (lambda: Upsample(2, "bilinear"), (2, 3, 3)),
    "bilinear, odd and even": (lambda: Upsample((3, 4), "bilinear"), (3, 2, 2)),
    "bilinear, one pixel, one channel": (lambda: Upsample((2, 5), "bilinear"), (1, 1, 1)),
    "bilinear along an axis": (lambda: Upsample((2, 1), "bilinear"), (3, 2, 2)),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES)
def test_layers_that_enlarge_images_keep_the_contract(case: str, backend: Backend) -> None:
    make, shape = CASES[case]
    check_layer(make(), shape, backend=backend, batch=2)


def loops(x: np.ndarray, w: np.ndarray, layer: Any) -> np.ndarray:
    """The definition: every input pixel and channel adds its filter to the output."""
    n, height, width, channels = x.shape
    (top, bottom), (left, right) = layer.geometry.padding
    rows, columns = np.add(layer.output_shape[:2], (top + bottom, left + right))
    filters = w.shape[-1]
    whole = np.zeros((n, rows, columns, filters * layer.groups))
    for i, j, c in product(range(height), range(width), range(channels)):
        own = c * layer.groups // channels * filters
        for r, t in np.ndindex(layer.kernel):
            row = i * layer.stride[0] + r * layer.dilation[0]
            column = j * layer.stride[1] + t * layer.dilation[1]
            whole[:, row, column, own : own + filters] += x[:, i, j, c, None] * w[c, r, t]
    return whole[:, top : rows - bottom, left : columns - right]


@each("case", [case for case in CASES if case[0] not in "nb"])
def test_a_transposed_convolution_is_a_sum_of_its_filters(case: str, backend: Backend) -> None:
    make, shape = CASES[case]
    layer: Any = make()
    model = Model(layer, shape, backend=backend, dtype="float64")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, *shape))
    if layer.bias:
        layer.b.master[...] = backend.asarray(rng.normal(size=layer.filters))
    b = backend.to_numpy(layer.b.master) if layer.bias else 0
    expected = loops(x, backend.to_numpy(layer.w.master), layer) + b
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-12, atol=1e-12)


def test_it_has_the_sizes_that_a_convolution_has_read() -> None:
    for size, kernel, stride, padding in product((5, 6, 7), (2, 3), (1, 2, 3), (0, 1)):
        there = Conv2d(2, kernel, stride=stride, padding=padding)
        rest = (size + 2 * padding - kernel) % stride
        back = ConvTranspose2d(
            3, kernel, stride=stride, padding=padding, output_padding=min(rest, stride - 1)
        )
        model = Model(Sequential(there, back), (size, size, 3), backend="numpy")
        assert model.output_shape == (size, size, 3)


def test_nearest_repeats_pixels_exactly(backend: Backend) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 5)).astype("float32")
    y = Model(Upsample((3, 2)), x.shape[1:], backend=backend).predict(x)
    np.testing.assert_array_equal(y, x.repeat(3, axis=1).repeat(2, axis=2))


@each("factor", [1, 2, 3, 4, 7])
def test_bilinear_interpolates_between_the_centres_of_pixels(factor: int, backend: Backend) -> None:
    x = np.random.default_rng(0).normal(size=(2, 4, 5, 3))
    y = Model(Upsample(factor, "bilinear"), x.shape[1:], backend=backend, dtype="float64").predict(
        x
    )
    at = [np.clip((np.arange(n * factor) + 0.5) / factor - 0.5, 0, n - 1) for n in (4, 5)]
    for axis, places in enumerate(at, start=1):
        low = np.minimum(places.astype(int), x.shape[axis] - 2)
        weight = np.expand_dims(places - low, [*range(axis), *range(axis + 1, 4)])
        x = x.take(low, axis) * (1 - weight) + x.take(low + 1, axis) * weight
    np.testing.assert_allclose(y, x, rtol=1e-12, atol=1e-12)


def test_a_constant_image_stays_constant(backend: Backend) -> None:
    x = np.full((1, 2, 3, 2), 0.7, "float32")
    for mode, factor in product(("nearest", "bilinear"), (2, 3, 5)):
        y = Model(Upsample(factor, mode), x.shape[1:], backend=backend).predict(x)  # type: ignore[arg-type]
        np.testing.assert_allclose(y, 0.7, rtol=1e-6)


@each(
    ("make", "sentence"),
    [
        (
            lambda: ConvTranspose2d(2, 3, stride=2, output_padding=2),
            r"ConvTranspose2d: output_padding must be 2 ints from 0 to below stride \(2, 2\)",
        ),
        (lambda: ConvTranspose2d(2, 3, padding="same"), 'padding must be ints or "valid", got "sa'),
        (lambda: ConvTranspose2d(2, 3, padding=3), "padding must be smaller than kernel 3, got 3"),
        (lambda: ConvTranspose2d(3, 3, groups=2), "must be divisible by groups=2, got 2 channels"),
        (lambda: Upsample(0), "Upsample: factor must be a positive int or 2 of them, got 0"),
        (lambda: Upsample(2, "bilinaer"), "unknown mode 'bilinaer'; did you mean 'bilinear'"),
        (lambda: Upsample(2.5), r"Upsample: factor must be a positive int or 2 of them, got 2\.5"),
    ],
)
def test_options_that_do_not_fit_are_told(make: Callable[[], Layer], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Model(make(), (4, 4, 2), backend="numpy")


def test_padding_that_leaves_nothing_is_told() -> None:
    with pytest.raises(ValueError, match=r"padding must leave some of the output \(3, 3\), got 2"):
        Model(ConvTranspose2d(2, 3, padding=2), (1, 1, 2), backend="numpy")


def decoder() -> list[Layer]:
    parts = [Conv2d(4, 3, stride=2, padding=1), ReLU(), ConvTranspose2d(3, 2, stride=2), ReLU()]
    return [*parts, Upsample(2, "bilinear"), Conv2d(2, 3), Flatten(), Linear(3)]


@each(
    ("plan", "meshes"),
    [(None, [{"data": 2}]), ("alternate", [{"model": 2}]), ("spatial", [{"spatial": 2}])],
)
def test_ranks_train_a_decoder_as_one_does(plan: Any, meshes: list[dict[str, int]]) -> None:
    check_plan(decoder, (6, 8, 2), plan, meshes=meshes)


def test_backward_of_a_frozen_layer_passes_gradients_on() -> None:
    net = Sequential(Linear(2), ConvTranspose2d(2, 2, name="up"))
    model = Model(net, (2, 2, 2), backend="numpy", dtype="float64")
    model.freeze("up")
    y, saved = model.forward(np.ones((1, 2, 2, 2)), StepContext(training=True))
    model.backward(np.ones_like(y), saved)
    assert (model.parameters["linear0.w"].grad != 0).any()
