"""Pooling: the reference against loops over windows, the cpu against the reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pydtnn.kernels import PoolGeometry, create_backend
from tests.each import each
from tests.kernels.checks import DTYPES, REFERENCE, eps, numeric_gradient

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


@each("name", EVERY)
def test_reference_maximum_equals_loops_over_windows(name):
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


@each("count_padding", [True, False])
@each("name", EVERY)
def test_reference_mean_equals_loops_over_windows(name, count_padding):
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


@each("size, output", BINS)
def test_reference_adaptive_mean_cuts_the_input_in_bins(size, output):
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


@each("reference", [True, False])
def test_nan_is_a_maximum_and_padding_never_is(cpu_backend, reference):
    pool = (REFERENCE if reference else cpu_backend).pool
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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_geometry_agrees_with_the_reference(cpu_backend, rng, dtype):
    """With a number of channels drawn for each; the first batch is empty."""
    for batch, (name, kind) in product((0, 3), EVERY.items()):
        g = replace(kind, channels=int(rng.choice(CHANNELS)))
        shape = (batch, *g.output, g.channels)
        x = rng.integers(-9, 9, (batch, *g.size, g.channels)).astype(dtype)
        dy, bins = rng.normal(size=shape).astype(dtype), (batch, *[2, 3, 1][: len(g.size)])
        results = []
        for pool in (cpu_backend.pool, REFERENCE.pool):
            made = [np.empty(s, dtype) for s in (*[shape, x.shape] * 3, (*bins, g.channels))]
            y, dx, mean, dmean, inside, dinside, adaptive = made
            indices = [np.empty(shape, kind) for kind in ("uint8", "int32")]
            for index in indices:
                pool.max_forward(x, g, out=y, index=index)
                pool.max_backward(dy, index, g, out=dx)
            for counted, out, back in ((True, mean, dmean), (False, inside, dinside)):
                pool.average_forward(x, g, out=out, count_padding=counted)
                pool.average_backward(dy, g, out=back, count_padding=counted)
            pool.adaptive_forward(x, out=adaptive)
            more = np.empty_like(x)
            pool.adaptive_backward(np.ones_like(adaptive), out=more)
            results.append([y, *indices, dx, mean, dmean, inside, dinside, adaptive, more])
        for actual, expected in zip(*results, strict=True):
            # up to 20 terms, in another order; maxima and indices are the same
            bound = 0 if actual.dtype != dtype or actual is results[0][0] else 200 * eps(dtype)
            np.testing.assert_allclose(actual, expected, rtol=0, atol=bound, err_msg=name)


@each("name", ["cpu", "numpy"])
def test_an_index_of_bytes_is_refused_for_windows_of_more_than_256_taps(name):
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
