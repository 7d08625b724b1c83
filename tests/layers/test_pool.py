"""Pooling layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    GlobalAvgPool2d,
    Layer,
    MaxPool2d,
    StepContext,
)
from pydtnn.model import Model
from pydtnn.testing import check_layer
from tests.each import each

AWKWARD: dict[str, tuple[Callable[[], Layer], tuple[int, ...]]] = {
    "max": (lambda: MaxPool2d(2), (4, 6, 3)),
    "max, rest left over": (lambda: MaxPool2d(2), (5, 3, 2)),
    "max, overlapping": (lambda: MaxPool2d(3, stride=(1, 2), padding=1), (4, 5, 2)),
    "max, asymmetric padding": (lambda: MaxPool2d((3, 2), padding=((2, 0), (0, 1))), (4, 5, 2)),
    "max, same": (lambda: MaxPool2d(3, stride=2, padding="same"), (4, 5, 2)),
    "max, gaps": (lambda: MaxPool2d(1, stride=2), (4, 5, 2)),
    "average": (lambda: AvgPool2d(2), (4, 6, 3)),
    "average, overlapping": (lambda: AvgPool2d((3, 2), stride=1, padding=1), (4, 3, 2)),
    "average, padding not counted": (
        lambda: AvgPool2d(3, stride=2, padding=((1, 2), (0, 1)), count_padding=False),
        (5, 4, 2),
    ),
    "adaptive": (lambda: AdaptiveAvgPool2d((2, 3)), (5, 7, 2)),
    "adaptive, as large as the input": (lambda: AdaptiveAvgPool2d((3, 2)), (3, 2, 2)),
    "adaptive, overlapping bins": (lambda: AdaptiveAvgPool2d(3), (5, 4, 1)),
    "global": (lambda: GlobalAvgPool2d(), (3, 5, 4)),
    "global, one pixel": (lambda: GlobalAvgPool2d(), (1, 1, 2)),
}


@each("case", AWKWARD)
def test_pooling_keeps_the_contract(case: str, backend: Backend) -> None:
    make, shape = AWKWARD[case]
    check_layer(make(), shape, backend=backend, batch=2)


def predict(layer: Layer, x: np.ndarray, backend: Backend) -> np.ndarray:
    return Model(layer, x.shape[1:], backend=backend, dtype="float64").predict(x)


def test_padding_never_is_the_maximum(backend: Backend) -> None:
    y = predict(MaxPool2d(3, stride=2, padding=1), np.full((1, 3, 3, 1), -5.0), backend)
    assert (y == -5).all()


def test_of_equal_maxima_the_first_takes_the_gradient(backend: Backend) -> None:
    layer = MaxPool2d(2)
    model = Model(layer, (2, 2, 1), backend=backend, dtype="float64", input_gradient=True)
    y, residuals = model.forward(np.ones((1, 2, 2, 1)), StepContext(training=True))
    dx = backend.to_numpy(model.backward(np.full(y.shape, 3.0), residuals))
    np.testing.assert_array_equal(dx.reshape(-1), [3, 0, 0, 0])


def test_padding_counts_in_the_mean_unless_told_otherwise(backend: Backend) -> None:
    x = np.ones((1, 2, 2, 1))
    assert predict(AvgPool2d(2, padding=1), x, backend)[0, 0, 0, 0] == 0.25
    assert predict(AvgPool2d(2, padding=1, count_padding=False), x, backend)[0, 0, 0, 0] == 1


def test_global_pooling_gives_the_mean_of_each_channel(backend: Backend) -> None:
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 2))
    np.testing.assert_allclose(
        predict(GlobalAvgPool2d(), x, backend), x.mean(axis=(1, 2)), rtol=1e-12
    )


def test_pooling_options_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match=r"MaxPool2d: kernel 5 .* at most the padded input 4"):
        Model(MaxPool2d(5), (4, 4, 1), backend="numpy")
    with pytest.raises(ValueError, match="AvgPool2d: padding must be smaller than kernel 2, got 2"):
        Model(AvgPool2d(2, padding=2), (4, 4, 1), backend="numpy")
    with pytest.raises(
        ValueError, match=r"output_size must be at most the input \(4, 4\), got \(5, 5\)"
    ):
        Model(AdaptiveAvgPool2d(5), (4, 4, 1), backend="numpy")
    with pytest.raises(
        ValueError, match=r"GlobalAvgPool2d: expected an input of shape \(H, W, C\)"
    ):
        Model(GlobalAvgPool2d(), (4, 4), backend="numpy")
    with pytest.raises(ValueError, match="MaxPool2d: stride must be a positive int"):
        MaxPool2d(2, stride=0)
