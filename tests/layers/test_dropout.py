"""Dropout."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.layers import Dropout, Sequential, StepContext
from pydtnn.model import Model
from pydtnn.testing import check_layer
from tests.each import each


@each("rate", [0.0, 0.3, 0.9])
def test_dropout_keeps_the_contract(rate: float, backend: Backend) -> None:
    check_layer(Dropout(rate), (3, 5), backend=backend)


def drop(backend: Backend, rate: float = 0.4, features: int = 50, **context: object) -> np.ndarray:
    """Ones for samples 0 to 5, after dropout."""
    model = Model(Dropout(rate), (features,), backend=backend, dtype="float64")
    samples = context.pop("samples", np.arange(6))
    context = {"training": True, "samples": samples, **context}
    y, _ = model.forward(np.ones((len(samples), features)), StepContext(**context))
    return backend.to_numpy(y)


def test_the_mask_of_a_sample_depends_neither_on_its_place_nor_on_the_others(
    backend: Backend,
) -> None:
    together = drop(backend)
    order = np.array([4, 1, 5])
    np.testing.assert_array_equal(drop(backend, samples=order), together[order])


@each("change", [{"seed": 1}, {"epoch": 1}, {"samples": np.arange(6) + 2**40}])
def test_masks_differ_between_seeds_epochs_and_samples(
    change: dict[str, object], backend: Backend
) -> None:
    assert (drop(backend, **change) != drop(backend)).any()


def test_masks_differ_between_samples_and_between_layers(backend: Backend) -> None:
    y = drop(backend)
    assert len(np.unique(y, axis=0)) == len(y)
    model = Model(Sequential(Dropout(0.4), Dropout(0.4)), (50,), backend=backend, dtype="float64")
    both, _ = model.forward(np.ones((6, 50)), StepContext(training=True, samples=np.arange(6)))
    assert (backend.to_numpy(both) == 0).sum() > (y == 0).sum()


@each("rate", [0.1, 0.5, 0.8])
def test_elements_are_dropped_at_the_rate_and_the_others_scaled(
    rate: float, backend: Backend
) -> None:
    y = drop(backend, rate, features=5000)
    # 30000 draws: four standard deviations are 4 sqrt(rate (1 - rate) / 30000) < 0.012
    assert abs((y == 0).mean() - rate) < 0.012
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-15)


def test_backward_drops_by_the_same_mask(backend: Backend) -> None:
    model = Model(Dropout(0.4), (50,), backend=backend, dtype="float64", input_gradient=True)
    context = StepContext(training=True, samples=np.arange(6))
    y, residuals = model.forward(np.ones((6, 50)), context)
    dx = model.backward(np.ones((6, 50)), residuals)
    np.testing.assert_array_equal(backend.to_numpy(dx), backend.to_numpy(y))


def test_nothing_is_dropped_in_evaluation(backend: Backend) -> None:
    assert (drop(backend, training=False) == 1).all()


def test_dropout_without_samples_says_what_is_missing() -> None:
    model = Model(Dropout(0.4), (5,), backend="numpy")
    with pytest.raises(ValueError, match="Dropout: training requires the ids of the samples"):
        model.forward(np.ones((2, 5), "float32"), StepContext(training=True))


@each("rate", [-0.1, 1.0, float("nan")])
def test_the_rate_must_be_below_one(rate: float) -> None:
    with pytest.raises(ValueError, match="Dropout: rate must be at least 0 and below 1"):
        Dropout(rate)
