"""Pooling layers."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.layers import AvgPool2d, Layer, MaxPool2d, StepContext
from pydtnn.model import Model


def predict(layer: Layer, x: np.ndarray, backend: Backend) -> np.ndarray:
    return Model(layer, x.shape[1:], backend=backend, dtype="float64").predict(x)


def test_padding_never_is_the_maximum(backend):
    y = predict(MaxPool2d(3, stride=2, padding=1), np.full((1, 3, 3, 1), -5.0), backend)
    assert (y == -5).all()


def test_of_equal_maxima_the_first_takes_the_gradient(backend):
    layer = MaxPool2d(2)
    model = Model(layer, (2, 2, 1), backend=backend, dtype="float64", input_gradient=True)
    y, residuals = model.forward(np.ones((1, 2, 2, 1)), StepContext(training=True))
    dx = backend.to_numpy(model.backward(np.full(y.shape, 3.0), residuals))
    np.testing.assert_array_equal(dx.reshape(-1), [3, 0, 0, 0])


def test_padding_counts_in_the_mean_unless_told_otherwise(backend):
    x = np.ones((1, 2, 2, 1))
    assert predict(AvgPool2d(2, padding=1), x, backend)[0, 0, 0, 0] == 0.25
    assert predict(AvgPool2d(2, padding=1, count_padding=False), x, backend)[0, 0, 0, 0] == 1
