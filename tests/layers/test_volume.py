"""Layers of volumes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import (
    AvgPool3d,
    Conv3d,
    Flatten,
    GlobalAvgPool3d,
    Layer,
    Linear,
    MaxPool3d,
    ReLU,
    Sequential,
)
from pydtnn.model import Model
from pydtnn.testing import check_layer, check_plan
from tests.each import each

AWKWARD: dict[str, tuple[Callable[[], Layer], tuple[int, ...]]] = {
    "1x1x1": (lambda: Conv3d(3, 1), (2, 3, 2, 2)),
    "same, even kernel": (lambda: Conv3d(2, 2, padding="same"), (3, 2, 4, 2)),
    "stride and uneven padding": (
        lambda: Conv3d(2, (2, 3, 1), stride=(1, 2, 3), padding=((1, 0), (0, 2), (0, 0))),
        (3, 4, 5, 2),
    ),
    "dilation": (lambda: Conv3d(2, 2, dilation=(2, 1, 2), bias=False), (3, 2, 3, 1)),
    "groups": (lambda: Conv3d(4, (3, 1, 2), groups=2, padding=(1, 0, 1)), (2, 3, 2, 4)),
    "depthwise": (lambda: Conv3d(3, 2, groups=3), (3, 2, 2, 3)),
    "max": (lambda: MaxPool3d(2), (4, 3, 2, 3)),
    "max, overlapping": (lambda: MaxPool3d((2, 3, 1), stride=1, padding=(1, 1, 0)), (3, 4, 2, 2)),
    "average": (lambda: AvgPool3d(2, stride=(1, 2, 1)), (3, 4, 2, 2)),
    "average, padding not counted": (
        lambda: AvgPool3d(2, padding=((1, 0), (0, 1), (1, 1)), count_padding=False),
        (3, 3, 2, 2),
    ),
    "global": (lambda: GlobalAvgPool3d(), (2, 3, 2, 4)),
}


@each("case", AWKWARD)
def test_layers_of_volumes_keep_the_contract(case: str, backend: Backend) -> None:
    make, shape = AWKWARD[case]
    check_layer(make(), shape, backend=backend, batch=2)


def test_a_convolution_of_volumes_is_a_sum_over_the_taps_of_its_filters(backend: Backend) -> None:
    model = Model(Conv3d(2, 2, initializer="ones"), (3, 3, 3, 2), backend=backend, dtype="float64")
    x = np.arange(54.0).reshape(1, 3, 3, 3, 2)
    y = model.predict(x)
    for d, i, j in product(range(2), repeat=3):
        sum_ = x[0, d : d + 2, i : i + 2, j : j + 2].sum()
        np.testing.assert_allclose(y[0, d, i, j], sum_, rtol=1e-13)


def test_a_plane_is_convolved_and_pooled_like_an_image(backend: Backend) -> None:
    from pydtnn.layers import Conv2d, MaxPool2d

    x = np.random.default_rng(0).normal(size=(2, 6, 7, 3))
    image = Sequential(Conv2d(5, 3, padding=1, name="conv"), MaxPool2d(2, name="pool"))
    plane = Sequential(
        Conv3d(5, (1, 3, 3), padding=(0, 1, 1), name="conv"), MaxPool3d((1, 2, 2), name="pool")
    )
    of_image = Model(image, x.shape[1:], backend=backend, dtype="float64")
    of_plane = Model(plane, (1, *x.shape[1:]), backend=backend, dtype="float64")
    w = of_image.parameters["conv.w"].master
    of_plane.parameters["conv.w"].master[...] = w[:, None]
    expected = of_image.predict(x)
    np.testing.assert_allclose(of_plane.predict(x[:, None])[:, 0], expected, rtol=1e-12, atol=1e-12)


def test_inputs_and_options_that_do_not_fit_are_told() -> None:
    volume = r"expected an input of shape \(D, H, W, C\), got \(8, 8, 3\)"
    for layer in (Conv3d(4, 3), MaxPool3d(2), AvgPool3d(2), GlobalAvgPool3d()):
        with pytest.raises(ValueError, match=f"{type(layer).__name__}: {volume}"):
            Model(layer, (8, 8, 3), backend="numpy")
    with pytest.raises(ValueError, match="Conv3d: kernel_size must be a positive int or 3 of them"):
        Conv3d(4, (3, 3))  # one axis is missing
    with pytest.raises(ValueError, match="Conv3d: padding must be smaller than kernel 3, got 3"):
        Model(Conv3d(4, 3, padding=3), (8, 8, 8, 3), backend="numpy")
    with pytest.raises(ValueError, match="Conv3d: channels and filters must be divisible by group"):
        Model(Conv3d(4, 3, groups=2), (8, 8, 8, 3), backend="numpy")
    with pytest.raises(ValueError, match="MaxPool3d: stride must be a positive int or 3 of them"):
        MaxPool3d(2, stride=(1, 2))


def small() -> list[Layer]:
    """Everything but batch norm, which mixes samples."""
    body = [Conv3d(4, 3, padding=1), ReLU(), MaxPool3d(2), Conv3d(6, 2, groups=2), ReLU()]
    return [*body, AvgPool3d(2, 1, padding=1), Flatten(), Linear(3)]


@each("meshes", [[{"data": 2}], [{"data": 3}]])
def test_ranks_train_on_volumes_as_one_does(meshes: list[dict[str, int]]) -> None:
    check_plan(small, (5, 6, 5, 2), meshes=meshes)


def test_arguments_of_other_libraries_are_answered() -> None:
    with pytest.raises(TypeError, match=r"use Conv3d\(filters, kernel_size\)"):
        Conv3d(3, 16, 3)  # type: ignore[misc]
    with pytest.raises(TypeError, match="use stride="):
        Conv3d(16, 3, strides=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="use count_padding="):
        AvgPool3d(2, count_include_pad=True)  # type: ignore[call-arg]
