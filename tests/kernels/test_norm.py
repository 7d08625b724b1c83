"""Normalisation: the reference against calculus, the cpu against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from tests.each import each
from tests.kernels.checks import DTYPES, REFERENCE, numeric_gradient

# samples, positions, channels, groups
GROUPS = [
    (0, 4, 6, 3), (3, 1, 1, 1), (5, 1, 17, 1), (130, 1, 100, 1), (2, 1, 1500, 1), (3, 49, 16, 4),
    (2, 7, 5, 5), (2, 130, 12, 2), (37, 5, 64, 1), (3, 1, 8, 2), (2, 3, 1200, 3),
]  # fmt: skip


def moments(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance from the count, the sums and the sums of squares."""
    mean, square = sums[1:].reshape(2, -1) / sums[0]
    return mean, square - mean**2


def batch_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Batch norm as the textbook has it."""
    return gamma * (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5) + beta


def group_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, groups: int) -> np.ndarray:
    """Group norm as the textbook has it."""
    y = np.empty_like(x)
    for n in range(len(x)):
        for c in np.split(np.arange(x.shape[2]), groups):
            part = x[n][:, c]
            y[n][:, c] = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
    return y * gamma + beta


@each("positions, groups", [(1, 1), (1, 3), (5, 1), (4, 3)])
def test_reference_group_norm_has_the_gradient_of_the_textbook(positions, groups):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 2, positions, 6))
    gamma, beta = rng.normal(size=(2, 6))
    y, dx = np.empty_like(x), np.empty_like(x)
    mean, inv_std = np.empty((2, 2, groups))
    dgamma, dbeta = np.empty((2, 6))
    norm = REFERENCE.norm
    norm.group_forward(x, gamma, beta, groups, 1e-5, out=y, mean=mean, inv_std=inv_std)
    norm.group_backward(x, dy, gamma, groups, mean, inv_std, out=dx, dgamma=dgamma, dbeta=dbeta)
    np.testing.assert_allclose(y, group_norm(x, gamma, beta, groups), atol=1e-12)
    for value, numeric in [
        (dx, numeric_gradient(lambda v: group_norm(v, gamma, beta, groups), x, dy)),
        (dgamma, numeric_gradient(lambda v: group_norm(x, v, beta, groups), gamma, dy)),
        (dbeta, numeric_gradient(lambda v: group_norm(x, gamma, v, groups), beta, dy)),
    ]:
        np.testing.assert_allclose(value, numeric, atol=1e-8)


@each("channels", [1, 3, 16, 33, 64, 100])
def test_variance_survives_a_mean_of_a_thousand_deviations(cpu_backend, channels):
    rng = np.random.default_rng(0)
    x = (1000 + rng.normal(size=(5000, channels))).astype("float32")
    x[::128] += 5  # the rows that blocks are summed relative to lie far out
    sums = np.empty(1 + 2 * channels)
    cpu_backend.norm.statistics(x, out=sums)
    mean, variance = moments(sums)
    exact = x.astype("float64")
    np.testing.assert_allclose(mean, exact.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(variance, exact.var(axis=0), rtol=1e-5)


def test_one_far_outlier_does_not_spoil_the_variance(cpu_backend):
    x = np.random.default_rng(0).normal(size=(20000, 16)).astype("float32")
    x[0] = 1e4
    sums = np.empty(33)
    cpu_backend.norm.statistics(x, out=sums)
    np.testing.assert_allclose(moments(sums)[1], x.astype("float64").var(axis=0), rtol=1e-5)


def test_maps_of_floats_do_not_cancel_with_coefficients_in_double(cpu_backend):
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 200, 5)).astype("float32")
    x += 1000
    scale = rng.normal(1, 0.1, 5)
    shift = -1000 * scale
    a, y = np.ones(5), np.empty_like(x)
    exact = x.astype("float64") * scale + shift
    cpu_backend.norm.normalize(x, scale, shift, out=y)
    np.testing.assert_allclose(y, exact, atol=1e-6)  # a plain x scale + shift is off by 6e-5
    cpu_backend.norm.backward_normalize(x, dy, a, scale, shift, out=y)
    np.testing.assert_allclose(y, dy + exact, atol=2e-6)


def test_layer_norm_survives_a_mean_of_a_thousand_deviations(cpu_backend):
    x = (1000 + np.random.default_rng(0).normal(size=(9, 1, 300))).astype("float32")
    y = np.empty_like(x)
    mean, inv_std = np.empty((2, 9, 1))
    one, zero = np.ones(300, "float32"), np.zeros(300, "float32")
    cpu_backend.norm.group_forward(x, one, zero, 1, 0.0, out=y, mean=mean, inv_std=inv_std)
    exact = x.astype("float64")
    exact = (exact - exact.mean(axis=2, keepdims=True)) / exact.std(axis=2, keepdims=True)
    np.testing.assert_allclose(y, exact, atol=2e-6)


def test_coefficients_normalise_and_their_backward_is_that_of_batch_norm():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 11, 3))
    gamma, beta = rng.normal(size=(2, 3))
    sums, dsums, own, maps = np.empty(7), np.empty((2, 3)), np.empty((2, 3)), np.empty((2, 3, 3))
    grads, y, dx, norm = np.empty((2, 3)), np.empty_like(x), np.empty_like(x), REFERENCE.norm
    norm.statistics(x, out=sums)
    np.testing.assert_allclose(moments(sums), [x.mean(axis=0), x.var(axis=0)], rtol=1e-12)
    norm.coefficients(sums, gamma, beta, 1e-5, moments=own, out=maps[0])
    pivot, factor, shift = maps[0]
    norm.normalize(x, factor, shift - pivot * factor, out=y)
    np.testing.assert_allclose(y, batch_norm(x, gamma, beta), rtol=1e-12)
    norm.backward_statistics(x, dy, pivot, np.ones(3), out=dsums)
    norm.backward_coefficients(
        dsums, 11.0, own, pivot, gamma, dgamma=grads[0], dbeta=grads[1], out=maps[1]
    )
    a, b, c = maps[1]
    norm.backward_normalize(x, dy, a, b, c - b * pivot, out=dx)
    for value, numeric in [
        (dx, numeric_gradient(lambda x: batch_norm(x, gamma, beta), x, dy)),
        (grads[0], numeric_gradient(lambda gamma: batch_norm(x, gamma, beta), gamma, dy)),
        (grads[1], numeric_gradient(lambda beta: batch_norm(x, gamma, beta), beta, dy)),
    ]:
        np.testing.assert_allclose(value, numeric, atol=1e-7)


@each("groups", GROUPS)
def test_group_norm_of_doubles_survives_a_mean_of_a_million_deviations(cpu_backend, groups):
    n, positions, channels, count = groups
    if positions * channels // count < 2 or n == 0:
        return  # one element has no deviation
    rng = np.random.default_rng(5)
    deviations = rng.normal(size=(n, positions, channels))
    x = deviations + 1e6
    x[:, 0, 0] += 100  # an outlier where a pivot might be taken from
    deviations = x - 1e6  # exact: what was rounded away is no part of x
    gamma, beta = rng.normal(size=(2, channels))
    y, mean, inv_std = np.empty_like(x), *np.empty((2, n, count))
    cpu_backend.norm.group_forward(x, gamma, beta, count, 1e-5, out=y, mean=mean, inv_std=inv_std)
    # x - mean loses the places of 1e6 beside a deviation of 1; sums about zero lost 1e-4
    np.testing.assert_allclose(y, group_norm(deviations, gamma, beta, count), rtol=0, atol=1e-8)


@each("rows", [1, 2, 257, 4099])
@each("mean", [0.0, 1.0, 1e6, -1e8])
def test_sums_of_doubles_of_several_shards_keep_the_variance(cpu_backend, rows, mean):
    rng = np.random.default_rng(6)
    x = mean + rng.normal(size=(rows, 17))
    deviations = x - mean  # exact
    for norm in (REFERENCE.norm, cpu_backend.norm):
        sums = np.zeros(norm.sums_length(17, x.dtype))
        for shard in np.array_split(x, 5):
            norm.statistics(shard, out=sums, accumulate=True)
        found, variance = norm.moments(sums, 17)
        assert sums[0] == rows
        # a mean has the last place of a double; squares have 79 bits
        lost = 1e-14 + 8 * 2.0**-79 * mean**2
        offsets = deviations.mean(axis=0)
        np.testing.assert_allclose(found - mean, offsets, rtol=0, atol=1e-14 + 4e-16 * abs(mean))
        np.testing.assert_allclose(variance, deviations.var(axis=0), rtol=1e-12, atol=lost)
        constant = norm.constant_sums(found, variance, x.dtype)
        again = norm.moments(constant, 17)
        np.testing.assert_allclose(again, (found, variance), rtol=1e-12, atol=lost)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@each("dtype", DTYPES)
@each("special", [np.nan, np.inf, -np.inf])
@each("positions, groups", [(1, 1), (3, 1), (3, 3), (1, 0)])
def test_a_row_that_is_not_finite_has_the_statistics_of_the_reference(
    cpu_backend, dtype, special, positions, groups
):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, positions, 33)).astype(dtype)
    x[1, 0, 17] = x[2, 0, 32] = special
    results = []
    for norm in (cpu_backend.norm, REFERENCE.norm):
        arrays = [np.ones(33, dtype), np.ones(33, dtype), np.zeros(33, dtype), np.empty_like(x)]
        gamma, beta, dgamma, y = arrays
        mean, scale, dx = *np.empty((2, 4, max(groups, 1))), np.empty_like(x)
        if groups:
            norm.group_forward(x, gamma, beta, groups, 1e-5, out=y, mean=mean, inv_std=scale)
            given = (x, np.ones_like(x), gamma, groups, mean, scale)
            norm.group_backward(*given, out=dx, dgamma=dgamma, dbeta=beta)
        else:
            norm.rms_forward(x[:, 0], gamma, 1e-5, out=y[:, 0], inv_rms=scale)
            given = (x[:, 0], np.ones_like(x[:, 0]), gamma, scale)
            norm.rms_backward(*given, out=dx[:, 0], dgamma=dgamma)
        results.append([np.isnan(array) for array in (y, scale, dx, dgamma)])
    np.testing.assert_equal(*results)


def test_gradients_of_a_group_norm_may_have_strides(cpu_backend, rng):
    x, dy = rng.normal(size=(2, 4, 3, 32)).astype("float32")
    mean, scale, gamma = np.zeros((4, 2)), np.ones((4, 2)), np.ones(32, "float32")
    results = []
    for norm in (cpu_backend.norm, REFERENCE.norm):
        for steps in ((1, 1), (2, 1), (1, 2)):
            dgamma, dbeta = (np.zeros(32 * step, "float32")[::step] for step in steps)
            norm.group_backward(
                x, dy, gamma, 2, mean, scale, out=np.empty_like(x), dgamma=dgamma, dbeta=dbeta
            )
            results.append((dgamma, dbeta))
    for found in results:
        np.testing.assert_allclose(found, results[-1], rtol=1e-5, atol=1e-5)


def test_sums_of_float64_have_second_parts(cpu_backend):
    lengths = [cpu_backend.norm.sums_length(8, np.dtype(name)) for name in ("float32", "float64")]
    assert lengths == [1 + 2 * 8, 1 + 4 * 8]
