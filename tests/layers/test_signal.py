"""Layers of signals."""

from __future__ import annotations

import copy

import numpy as np

from pydtnn.layers import (
    AvgPool1d,
    AvgPool3d,
    BatchNorm,
    Conv1d,
    Conv2d,
    Conv3d,
    Flatten,
    Layer,
    Linear,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    ReLU,
    Sequential,
)
from pydtnn.model import Model
from pydtnn.tools.testing import check_plan
from tests.each import each


@each("dtype", ["float32", "bfloat16"])
@each(
    ("layers", "shape"),
    [
        ((Conv1d(5, 3, padding=1), MaxPool1d(2)), (7, 3)),
        ((Conv3d(5, (1, 3, 3), padding=(0, 1, 1)), MaxPool3d((1, 2, 2))), (1, 6, 7, 3)),
    ],
)
def test_signals_and_planes_are_convolved_and_pooled_like_images(layers, shape, dtype, backend):
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    model = Model(Sequential(*copy.deepcopy(layers)), shape, backend=backend, dtype=dtype)
    row = len(shape) == 2
    kernel, size, padding = ((1, 3), (1, 2), (0, 1)) if row else ((3, 3), (2, 2), (1, 1))
    net = Sequential(Conv2d(5, kernel, padding=padding), MaxPool2d(size))
    image = Model(net, (1, *shape) if row else shape[1:], backend=backend, dtype=dtype)
    w = image.parameters["conv2d0.w"].master
    w[...] = next(iter(model.parameters.values())).master.reshape(w.shape)
    found, expected = model.predict(x), image.predict(x.reshape(2, *image.input_shapes[0]))
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


def small() -> list[Layer]:
    body = [Conv1d(4, 3, padding=1), BatchNorm(), ReLU(), MaxPool1d(2), Conv1d(6, 2, groups=2)]
    return [*body, ReLU(), AvgPool1d(2, 1, padding=1), Flatten(), Linear(3)]


def volumes() -> list[Layer]:
    """Without batch norm, which mixes samples."""
    body = [Conv3d(4, 3, padding=1), ReLU(), MaxPool3d(2), Conv3d(6, 2, groups=2), ReLU()]
    return [*body, AvgPool3d(2, 1, padding=1), Flatten(), Linear(3)]


@each(
    ("net", "plan", "mesh"),
    [
        (small, None, {"data": 3}),
        (small, "filter", {"filter": 2}),
        (small, "channel", {"channel": 2}),
        (volumes, None, {"data": 3}),
    ],
)
def test_ranks_train_on_signals_and_volumes_as_one_does(net, plan, mesh):
    check_plan(net, (13, 2) if net is small else (5, 6, 5, 2), plan, meshes=[mesh])
