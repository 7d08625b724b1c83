"""Dropout."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.layers import Dropout, Sequential, StepContext
from pydtnn.model import Model
from tests.each import each


def drop(backend: Backend, rate: float = 0.4, features: int = 50, **context: object) -> np.ndarray:
    """Ones for samples 0 to 5, after dropout."""
    model = Model(Dropout(rate), (features,), backend=backend, dtype="float64")
    samples = context.pop("samples", np.arange(6))
    context = {"training": True, "samples": samples, **context}
    y, _ = model.forward(np.ones((len(samples), features)), StepContext(**context))
    return backend.to_numpy(y)


def test_the_mask_of_a_sample_depends_neither_on_its_place_nor_on_the_others(backend):
    together = drop(backend)
    order = np.array([4, 1, 5])
    np.testing.assert_array_equal(drop(backend, samples=order), together[order])


def test_masks_differ_between_seeds_epochs_samples_and_layers(backend):
    y = drop(backend)
    assert len(np.unique(y, axis=0)) == len(y)
    for change in ({"seed": 1}, {"epoch": 1}, {"samples": np.arange(6) + 2**40}):
        assert (drop(backend, **change) != y).any()
    assert (drop(backend, training=False) == 1).all()
    model = Model(Sequential(Dropout(0.4), Dropout(0.4)), (50,), backend=backend, dtype="float64")
    both, _ = model.forward(np.ones((6, 50)), StepContext(training=True, samples=np.arange(6)))
    assert (backend.to_numpy(both) == 0).sum() > (y == 0).sum()


@each("rate", [0.1, 0.5, 0.8])
def test_elements_are_dropped_at_the_rate_and_the_others_scaled(rate, backend):
    y = drop(backend, rate, features=5000)
    # 30000 draws: four standard deviations are 4 sqrt(rate (1 - rate) / 30000) < 0.012
    assert abs((y == 0).mean() - rate) < 0.012
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-15)
