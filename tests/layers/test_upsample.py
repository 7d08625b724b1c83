"""Layers that enlarge images: transposed convolution and interpolation."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np

from pydtnn.layers import Conv2d, ConvTranspose2d, Flatten, Layer, Linear, ReLU, Upsample
from pydtnn.model import Model
from pydtnn.tools.testing import check_plan
from tests.each import each
from tests.layers.test_contracts import LAYERS


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


@each(("layer", "shape"), [c for c in LAYERS["enlarging"] if isinstance(c[0], ConvTranspose2d)])
def test_a_transposed_convolution_is_a_sum_of_its_filters(layer, shape, backend):
    layer = copy.deepcopy(layer)
    model = Model(layer, shape, backend=backend, dtype="float64")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, *shape))
    if layer.bias:
        layer.b.master[...] = backend.asarray(rng.normal(size=layer.filters))
    b = backend.to_numpy(layer.b.master) if layer.bias else 0
    expected = loops(x, backend.to_numpy(layer.w.master), layer) + b
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-12, atol=1e-12)


def test_nearest_repeats_pixels_exactly(backend):
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 5)).astype("float32")
    y = Model(Upsample((3, 2)), x.shape[1:], backend=backend).predict(x)
    np.testing.assert_array_equal(y, x.repeat(3, axis=1).repeat(2, axis=2))


@each("factor", [1, 2, 3, 4, 7])
def test_bilinear_interpolates_between_the_centres_of_pixels(factor, backend):
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


def decoder() -> list[Layer]:
    parts = [Conv2d(4, 3, stride=2, padding=1), ReLU(), ConvTranspose2d(3, 2, stride=2), ReLU()]
    return [*parts, Upsample(2, "bilinear"), Conv2d(2, 3), Flatten(), Linear(3)]


@each(
    ("plan", "meshes"),
    [(None, [{"data": 2}]), ("alternate", [{"model": 2}]), ("spatial", [{"spatial": 2}])],
)
def test_ranks_train_a_decoder_as_one_does(plan, meshes):
    check_plan(decoder, (6, 8, 2), plan, meshes=meshes)
