"""Pooling: the reference against loops over windows, the cpu against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pydtnn.kernels import Backend, PoolGeometry, create_backend
from tests.kernels.checks import DTYPES, REFERENCE, eps, numeric_gradient, same_for_all_threads

CHANNELS = [1, 3, 5, 16, 17, 64, 100]


def geometry(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
) -> PoolGeometry:
    """A geometry with 3 channels."""
    return PoolGeometry(size, kernel, stride, padding, 3)


GEOMETRIES = {
    "2x2 stride 2": geometry((8, 6), (2, 2), (2, 2), ((0, 0), (0, 0))),
    "3x3 stride 2, padded": geometry((7, 8), (3, 3), (2, 2), ((1, 1), (1, 1))),
    "1x1": geometry((4, 3), (1, 1), (1, 1), ((0, 0), (0, 0))),
    "whole image": geometry((5, 4), (5, 4), (1, 1), ((0, 0), (0, 0))),
    "stride beyond the kernel": geometry((11, 9), (2, 3), (4, 5), ((0, 1), (2, 0))),
    "uneven padding": geometry((5, 7), (4, 3), (1, 2), ((3, 0), (0, 2))),
    "rows left over": geometry((9, 9), (2, 2), (2, 3), ((0, 0), (0, 0))),
}
VOLUMES = {
    "signal": geometry((17,), (3,), (2,), ((1, 1),)),
    "signal, gaps": geometry((11,), (2,), (3,), ((0, 1),)),
    "volume": geometry((4, 6, 5), (2, 2, 2), (2, 2, 2), ((0, 0),) * 3),
    "volume, overlapping": geometry((5, 4, 6), (3, 2, 3), (1, 2, 2), ((1, 0), (0, 1), (2, 1))),
    "volume, gaps": geometry((7, 5, 4), (2, 1, 2), (3, 2, 3), ((0, 1), (0, 0), (1, 0))),
}
EVERY = GEOMETRIES | VOLUMES
BINS = [((1, 1), (1, 1)), ((8, 8), (1, 1)), ((7, 5), (3, 2)), ((6, 4), (3, 4)), ((2, 3), (5, 4))]
BINS_OF_VOLUMES = [((4, 3, 5), (1, 1, 1)), ((5, 4, 3), (3, 2, 1)), ((2, 3, 2), (3, 4, 2))]


def brute_windows(
    g: PoolGeometry,
) -> list[tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]]:
    """For each output position, the tap and the position of each input in its window."""
    windows = []
    for out in product(*map(range, g.output)):
        inputs = []
        for tap, offset in enumerate(product(*map(range, g.kernel))):
            at = tuple(
                o * s + k - p
                for o, s, k, (p, _) in zip(out, g.stride, offset, g.padding, strict=True)
            )
            if all(0 <= i < n for i, n in zip(at, g.size, strict=True)):
                inputs.append((tap, at))
        windows.append((out, inputs))
    return windows


@pytest.mark.parametrize("name", EVERY)
def test_reference_maximum_equals_loops_over_windows(name: str) -> None:
    g = EVERY[name]
    x = np.random.default_rng(0).integers(0, 5, (2, *g.size, 3)).astype("float64")  # many ties
    y, index = np.empty((2, *g.output, 3)), np.empty((2, *g.output, 3), "int32")
    REFERENCE.pool.max_forward(x, g, out=y, index=index)
    dx, expected = np.empty_like(x), np.zeros_like(x)
    dy = np.random.default_rng(1).normal(size=y.shape)
    REFERENCE.pool.max_backward(dy, index, g, out=dx)
    for n, (out, inputs), c in product(range(2), brute_windows(g), range(3)):
        values = [x[n, *at, c] for _, at in inputs]
        first = values.index(max(values))
        assert y[n, *out, c] == values[first]
        assert index[n, *out, c] == inputs[first][0]
        expected[n, *inputs[first][1], c] += dy[n, *out, c]
    np.testing.assert_allclose(dx, expected, atol=1e-15)


@pytest.mark.parametrize("count_padding", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_reference_mean_equals_loops_over_windows(name: str, count_padding: bool) -> None:
    g = EVERY[name]
    x = np.random.default_rng(0).normal(size=(2, *g.size, 3))
    y, dx = np.empty((2, *g.output, 3)), np.empty_like(x)
    expected_y, expected_dx = np.zeros_like(y), np.zeros_like(x)
    dy = np.random.default_rng(1).normal(size=y.shape)
    REFERENCE.pool.average_forward(x, g, out=y, count_padding=count_padding)
    REFERENCE.pool.average_backward(dy, g, out=dx, count_padding=count_padding)
    for out, inputs in brute_windows(g):
        count = np.prod(g.kernel) if count_padding else len(inputs)
        for _, at in inputs:
            expected_y[:, *out] += x[:, *at] / count
            expected_dx[:, *at] += dy[:, *out] / count
    np.testing.assert_allclose(y, expected_y, atol=1e-14)
    np.testing.assert_allclose(dx, expected_dx, atol=1e-14)


@pytest.mark.parametrize(("size", "output"), BINS)
def test_reference_adaptive_mean_cuts_the_input_in_bins(
    size: tuple[int, int], output: tuple[int, int]
) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, *size, 3)), rng.normal(size=(2, *output, 3))
    y, dx = np.empty_like(dy), np.empty_like(x)
    REFERENCE.pool.adaptive_forward(x, out=y)
    for i, j in product(*map(range, output)):
        # bin i holds the inputs whose cell of length 1 overlaps [i, i + 1) n / o
        rows, columns = (
            [p for p in range(n) if p < (k + 1) * n / o and p + 1 > k * n / o]
            for k, n, o in zip((i, j), size, output, strict=True)
        )
        expected = x[:, rows][:, :, columns].mean(axis=(1, 2))
        np.testing.assert_allclose(y[:, i, j], expected, atol=1e-14)

    def forward(value: np.ndarray) -> np.ndarray:
        result = np.empty_like(dy)
        REFERENCE.pool.adaptive_forward(value, out=result)
        return result

    REFERENCE.pool.adaptive_backward(dy, out=dx)
    np.testing.assert_allclose(dx, numeric_gradient(forward, x, dy), atol=1e-8)


@pytest.mark.parametrize("backend_name", ["reference", "cpu"])
def test_nan_is_a_maximum_and_padding_never_is(cpu_backend: Backend, backend_name: str) -> None:
    pool = (REFERENCE if backend_name == "reference" else cpu_backend).pool
    g = replace(geometry((3, 3), (2, 2), (2, 2), ((1, 0), (1, 0))), channels=20)
    x = np.full((1, 3, 3, 20), -np.inf)
    x[0, 2, 2, 0], x[0, 2, 1, 0], x[0, 1, 2, 0] = np.inf, np.nan, np.nan
    for dtype in DTYPES:
        y, index = np.empty((1, 2, 2, 20), dtype), np.empty((1, 2, 2, 20), "int32")
        pool.max_forward(x.astype(dtype), g, out=y, index=index)
        assert np.isnan(y[0, 1, 1, 0])
        assert index[0, 1, 1, 0] == 1  # of two NaN the first, and before infinity
        assert np.all(y[..., 1:] == -np.inf)
        # the first tap inside: 3 at the corner, 2 at the left edge, 1 at the top edge, 0 elsewhere
        np.testing.assert_array_equal(index[0, ..., 1], [[3, 2], [1, 0]])


@pytest.mark.few(140)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("index_type", ["uint8", "int32"])
def test_maximum_equals_the_reference(
    cpu_backend: Backend, name: str, channels: int, dtype: str, index_type: str
) -> None:
    g = replace(EVERY[name], channels=channels)
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, (3, *g.size, channels)).astype(dtype)
    dy = rng.normal(size=(3, *g.output, channels)).astype(dtype)
    results = []
    for backend in (cpu_backend, REFERENCE):
        y, dx, index = np.empty_like(dy), np.empty_like(x), np.empty(dy.shape, index_type)
        backend.pool.max_forward(x, g, out=y, index=index)
        backend.pool.max_backward(dy, index, g, out=dx)
        results.append((y, index, dx))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    # up to 20 terms of about 1, in another order
    np.testing.assert_allclose(results[0][2], results[1][2], atol=20 * eps(dtype))


@pytest.mark.few(140)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count_padding", [True, False])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", EVERY)
def test_mean_equals_the_reference(
    cpu_backend: Backend, name: str, channels: int, count_padding: bool, dtype: str
) -> None:
    g = replace(EVERY[name], channels=channels)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, *g.size, channels)).astype(dtype)
    dy = rng.normal(size=(3, *g.output, channels)).astype(dtype)
    results = []
    for backend in (cpu_backend, REFERENCE):
        y, dx = np.empty_like(dy), np.empty_like(x)
        backend.pool.average_forward(x, g, out=y, count_padding=count_padding)
        backend.pool.average_backward(dy, g, out=dx, count_padding=count_padding)
        results.append((y, dx))
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, atol=10 * eps(dtype))  # 20 terms below 1


@pytest.mark.few(75)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize(("size", "output"), [*BINS, *BINS_OF_VOLUMES])
def test_adaptive_mean_equals_the_reference(
    cpu_backend: Backend,
    size: tuple[int, ...],
    output: tuple[int, ...],
    channels: int,
    dtype: str,
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, *size, channels)).astype(dtype)
    dy = rng.normal(size=(3, *output, channels)).astype(dtype)
    results = []
    for backend in (cpu_backend, REFERENCE):
        y, dx = np.empty_like(dy), np.empty_like(x)
        backend.pool.adaptive_forward(x, out=y)
        backend.pool.adaptive_backward(dy, out=dx)
        results.append((y, dx))
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, atol=20 * eps(dtype))  # terms of about 1


def test_an_empty_batch_and_other_numbers_of_axes_are_taken(cpu_backend: Backend) -> None:
    for g in (
        GEOMETRIES["3x3 stride 2, padded"],
        geometry((9,), (3,), (2,), ((1, 1),)),
        geometry((4, 5, 6), (2, 2, 2), (2, 2, 2), ((0, 0),) * 3),
    ):
        for n in (0, 2):
            x = np.random.default_rng(0).normal(size=(n, *g.size, 3)).astype("float32")
            results = []
            for backend in (cpu_backend, REFERENCE):
                y = np.empty((n, *g.output, 3), "float32")
                index, dx = np.empty(y.shape, "int32"), np.empty_like(x)
                backend.pool.max_forward(x, g, out=y, index=index)
                backend.pool.max_backward(y, index, g, out=dx)
                results.append((y, index, dx))
            for actual, expected in zip(*results, strict=True):
                np.testing.assert_array_equal(actual, expected)


def test_strided_and_other_types_of_arrays_give_the_same_values(cpu_backend: Backend) -> None:
    g = GEOMETRIES["2x2 stride 2"]
    x = np.random.default_rng(0).integers(0, 99, (2, *g.size, 6)).astype("float32")
    expected, y = np.empty((2, 2, *g.output, 3), "float32")
    index, same = np.empty((2, *y.shape), "int32")
    REFERENCE.pool.max_forward(x[..., ::2], g, out=expected, index=same)
    cpu_backend.pool.max_forward(x[..., ::2], g, out=y, index=index)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(index, same)
    half = np.empty(y.shape, "float16")
    cpu_backend.pool.max_forward(x[..., ::2].astype("float16"), g, out=half, index=index)
    np.testing.assert_array_equal(half, expected)


def test_threads_do_not_change_a_byte(cpu_backend: Backend) -> None:
    g = replace(geometry((23, 19), (3, 4), (2, 1), ((1, 1), (2, 0))), channels=24)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(11, *g.size, 24)).astype("float32")
    dy = rng.normal(size=(11, *g.output, 24)).astype("float32")

    def run(backend: Backend) -> list[np.ndarray]:
        y, mean, index = np.empty_like(dy), np.empty_like(dy), np.empty(dy.shape, "int32")
        dx, dmean, dbins = np.empty_like([x, x, x])
        bins = np.empty((11, 5, 3, 24), "float32")
        backend.pool.max_forward(x, g, out=y, index=index)
        backend.pool.max_backward(dy, index, g, out=dx)
        backend.pool.average_forward(x, g, out=mean, count_padding=False)
        backend.pool.average_backward(dy, g, out=dmean, count_padding=False)
        backend.pool.adaptive_forward(x, out=bins)
        backend.pool.adaptive_backward(bins, out=dbins)
        return [y, index, dx, mean, dmean, bins, dbins]

    same_for_all_threads(cpu_backend, run)


@pytest.mark.parametrize("name", ["cpu", "numpy"])
def test_an_index_of_bytes_is_refused_for_windows_of_more_than_256_taps(name: str) -> None:
    backend = create_backend(name)
    g = geometry((17, 16), (17, 16), (1, 1), ((0, 0), (0, 0)))
    x = backend.asarray(np.arange(17 * 16 * 3, dtype="float32").reshape(1, 17, 16, 3))
    y, dx = backend.empty((1, 1, 1, 3), "float32"), backend.empty(x.shape, "float32")
    index = backend.empty(y.shape, "uint8")
    message = "index for windows of 272 taps must be int32, got uint8"
    with pytest.raises(ValueError, match=message):
        backend.pool.max_forward(x, g, out=y, index=index)
    with pytest.raises(ValueError, match=message):
        backend.pool.max_backward(y, index, g, out=dx)
