"""Batch, group and layer norm."""

import numpy as np

from pydtnn.kernels import create_backend
from pydtnn.layers import BatchNorm, GroupNorm, ReLU, RMSNorm, Sequential, StepContext
from pydtnn.model import Model
from tests.each import each

TRAINING = StepContext(training=True)


def test_batch_norm_normalises_with_the_batch_in_training(backend):
    x = np.random.default_rng(0).normal(3, 5, size=(8, 4, 4, 2))
    model = Model(BatchNorm(epsilon=1e-8), (4, 4, 2), backend=backend, dtype="float64")
    y = backend.to_numpy(model.forward(x, TRAINING)[0])
    np.testing.assert_allclose(y.mean(axis=(0, 1, 2)), 0, atol=1e-12)
    np.testing.assert_allclose(y.var(axis=(0, 1, 2)), 1, rtol=1e-8)


def test_a_large_mean_does_not_cancel_the_variance(backend):
    x = np.random.default_rng(0).normal(1000, 1, size=(512, 1)).astype("float32")
    model = Model(BatchNorm(), (1,), backend=backend)
    y, _ = model.forward(x, TRAINING)
    # 1000 / 2**24 is the rounding of x itself, in units of its deviation
    assert abs(float(y.std()) - 1) < 1e-3


def test_running_statistics_move_by_momentum_to_the_unbiased_moments(backend):
    rng = np.random.default_rng(0)
    model = Model(BatchNorm(momentum=0.3), (3, 2), backend=backend, dtype="float64")
    mean, variance = np.zeros(2), np.ones(2)
    for _ in range(3):
        x = rng.normal(2, 3, size=(5, 3, 2))
        model.forward(x, TRAINING)
        model.statistics.fold()
        mean = 0.7 * mean + 0.3 * x.mean(axis=(0, 1))
        variance = 0.7 * variance + 0.3 * x.var(axis=(0, 1), ddof=1)
    state = model.state()
    np.testing.assert_allclose(state["batchnorm.running_mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(state["batchnorm.running_variance"], variance, rtol=1e-12)


def test_batch_norm_normalises_with_the_running_statistics_otherwise(backend):
    rng = np.random.default_rng(0)
    model = Model(BatchNorm(epsilon=1e-3), (2,), backend=backend, dtype="float64")
    state = {
        "batchnorm.gamma": np.array([2.0, 3.0]),
        "batchnorm.beta": np.array([0.5, -0.5]),
        "batchnorm.running_mean": np.array([1.0, 2.0]),
        "batchnorm.running_variance": np.array([4.0, 9.0]),
    }
    model.load(state)
    x = rng.normal(size=(5, 2))
    expected = (x - [1, 2]) / np.sqrt(np.array([4, 9]) + 1e-3) * [2, 3] + [0.5, -0.5]
    np.testing.assert_allclose(model.predict(x), expected, rtol=1e-12)
    np.testing.assert_array_equal(backend.to_numpy(model.statistics.sums), 0)


def test_group_norm_normalises_each_sample_and_group(backend):
    x = np.random.default_rng(0).normal(3, 5, size=(4, 3, 3, 6))
    y = Model(GroupNorm(2, epsilon=1e-8), (3, 3, 6), backend=backend, dtype="float64").predict(x)
    groups = y.reshape(4, 9, 2, 3)
    np.testing.assert_allclose(groups.mean(axis=(1, 3)), 0, atol=1e-12)
    np.testing.assert_allclose(groups.var(axis=(1, 3)), 1, rtol=1e-7)


def test_rms_norm_keeps_the_mean_and_scales_to_a_mean_square_of_1(backend):
    x = np.random.default_rng(0).normal(3, 5, size=(4, 3, 6))
    model = Model(RMSNorm(epsilon=1e-9), (3, 6), backend=backend, dtype="float64")
    assert set(model.parameters) == {"rmsnorm.gamma"}
    y = backend.to_numpy(model.predict(x))
    np.testing.assert_allclose((y * y).mean(axis=-1), 1, rtol=1e-9)
    np.testing.assert_allclose(y / x, (y / x)[..., :1] * np.ones(6), rtol=1e-12)


@each("fuse", [True, False])
@each("name", ["cpu", "numpy"])
def test_batch_norm_of_doubles_survives_a_mean_of_a_million_deviations(name, fuse):
    rng = np.random.default_rng(7)
    deviations = rng.normal(size=(64, 3, 5))
    x = deviations + 1e6
    deviations = x - 1e6  # exact: what was rounded away is no part of x
    dy = rng.normal(size=x.shape)
    found = []
    for data in (x, deviations):
        layers = [BatchNorm(epsilon=1e-8, momentum=1.0), ReLU()]
        backend = create_backend(name, threads=1)
        model = Model(Sequential(*layers), (3, 5), backend=backend, dtype="float64", fuse=fuse)
        y, saved = model.forward(data, TRAINING)
        y = y.copy()
        model.backward(dy.copy(), saved)
        model.statistics.fold()
        running = model.statistics.running.copy()
        evaluated = model.forward(data, StepContext(training=False))[0].copy()
        found.append((y, layers[0].gamma.grad.copy(), running[5:], evaluated))
    # an element near 1e6 has a last place of 1e-10 deviations; sums about zero lost 1e-4
    for actual, exact in zip(*found, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=0, atol=5e-9)
