"""Rounding to formats of fewer bits: the bits of ml_dtypes, of the reference, and without bias."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from pydtnn.kernels import Backend
from pydtnn.kernels.number_format import NumberFormat, Rounding
from pydtnn.kernels.reference.random import Noise
from tests.each import each
from tests.kernels.checks import REFERENCE, same_for_all_threads

TYPES = {
    "e4m3": "float8_e4m3",
    "e4m3fn": "float8_e4m3fn",
    "e3m4": "float8_e3m4",
    "e5m2": "float8_e5m2",
    "e2m3": "float6_e2m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m1": "float4_e2m1fn",
    "e8m7": "bfloat16",
    "e5m10": "float16",
}
"""The formats that ml_dtypes or NumPy has."""

SHAPES = [(1, 1), (3, 17), (64, 100), (7, 1030), (50, 16)]


def every_kind(count: int, seed: int = 0) -> np.ndarray:
    """All upper halves of float32, and others: among them subnormal numbers, infinity and NaN."""
    rng = np.random.default_rng(seed)
    halves = np.arange(2**16, dtype="uint32") << 16
    words = rng.integers(0, 2**32, count, dtype="uint32")
    ties = rng.integers(-4096, 4096, count) / 512
    kinds = (halves.view("float32"), words.view("float32"), rng.normal(size=count), ties)
    return np.concatenate([kind.astype("float32") for kind in kinds])


def rounded(
    backend: Backend, x: np.ndarray, text: str, noise: Noise | None = None, axis: int = -1
) -> np.ndarray:
    out = np.empty_like(x)
    with np.errstate(invalid="ignore"):  # the quiet bit of NaN
        Rounding.parse(text).apply(backend, x, out=out, axis=axis, noise=noise)
    return out


def bits_of(x: np.ndarray) -> np.ndarray:
    return x.view("uint32")


@each("name", TYPES)
def test_numbers_are_those_of_ml_dtypes_also_subnormal_ones_and_ties(cpu_backend, name):
    x, form, dtype = every_kind(100_000)[None], NumberFormat.parse(name), np.dtype(TYPES[name])
    finite = np.isfinite(x)
    y = rounded(cpu_backend, x, f"{name}:none")
    expected = np.clip(x[finite], -form.largest, form.largest).astype(dtype).astype("float32")
    np.testing.assert_array_equal(bits_of(y[finite]), bits_of(expected))
    np.testing.assert_array_equal(bits_of(y[~finite]), bits_of(x[~finite]))
    assert form.largest == float(ml_dtypes.finfo(dtype).max)
    assert form.width == (int(ml_dtypes.finfo(dtype).bits))


@each("name", [*TYPES, "e7m20", "e2m22", "e6m9fn", "e8m1"])
def test_the_kernel_has_the_bits_of_the_reference(cpu_backend, rng, name):
    """On a shape that is drawn for each format."""
    shape, kinds = SHAPES[rng.integers(len(SHAPES))], every_kind(1000)
    x = rng.choice(kinds[np.isfinite(kinds)], shape).astype("float32")
    x = np.where(rng.random(shape) < 0.7, rng.normal(size=shape) * 1e-3, x).astype("float32")
    x[0, 0] = np.nan
    scales = ["none"] if name.startswith("e8") else ["none", "array", "channel", "2", "32", "3x8"]
    for scale in scales:
        for noise in (None, Noise(3, 5, 1, np.array([2**40])), Noise(3, 5, 1, np.arange(len(x)))):
            for axis in (0, -1):
                text = f"{name}:{scale}"
                y, z = (rounded(b, x, text, noise, axis) for b in (cpu_backend, REFERENCE))
                np.testing.assert_array_equal(bits_of(y), bits_of(z), err_msg=text)


def test_every_number_of_threads_gives_the_same_bytes(cpu_backend):
    x = np.random.default_rng(0).normal(size=(64, 1021)).astype("float32")
    noise = Noise(1, 2, 3, np.arange(64))
    same_for_all_threads(
        cpu_backend,
        lambda backend: [
            rounded(backend, x, f"e4m3:{scale}", words)
            for scale in ("array", "channel", "32", "16x16", "16:e4m3fn")
            for words in (None, noise)
        ],
    )


@each("name", ["e2m1", "e4m3", "e8m7"])
def test_random_rounding_has_no_bias_and_keeps_the_numbers_of_the_format(cpu_backend, name):
    """The standard error of a mean of n numbers with step s is at most s / (2 sqrt(n))."""
    count, noise = 100_000, Noise(7, 8, 9, np.arange(1000))
    for value in (1.1, -1.9, 0.3, 0.01):
        x = np.full((1000, 100), value, "float32")
        y = rounded(cpu_backend, x, f"{name}:none", noise)
        low, high = np.unique(y)[[0, -1]]
        assert len(np.unique(y)) == 2
        assert low < x[0, 0] < high
        assert abs(y.mean(dtype="float64") - x[0, 0]) < 4 * (high - low) / (2 * count**0.5)
        np.testing.assert_array_equal(rounded(cpu_backend, y, f"{name}:none", noise), y)
        other = rounded(cpu_backend, x, f"{name}:none", noise._replace(seed=8))
        assert 0.2 < np.mean(other == y) < 1
    part = rounded(
        cpu_backend, x[500:], f"{name}:none", noise._replace(samples=np.arange(500, 1000))
    )
    np.testing.assert_array_equal(part, y[500:])


def test_a_block_has_the_power_of_two_of_its_largest_element():
    x = np.array([[1.0, 0.3, 1e-3, 7.0, 0.0, 0.0, 5e9, 1e9]], "float32")
    y = rounded(REFERENCE, x, "e2m1:2")
    expected = [[1.0, 0.25, 0.0, 6.0, 0.0, 0.0, 2.0**32, 2.0**30]]
    np.testing.assert_array_equal(y, np.array(expected, "float32"))


def test_at_random_no_element_of_a_block_is_above_the_largest_number(cpu_backend):
    """Otherwise the expected value of 7 were 6: the power of two of the block is the next one."""
    x, noise = np.tile(np.array([7, 1], "float32"), (4000, 8)), Noise(1, 2, 3, np.arange(4000))
    y = rounded(cpu_backend, x, "e2m1:16:stochastic", noise)
    np.testing.assert_allclose(y.mean(0), x[0], atol=4 / 4000**0.5)
    assert rounded(cpu_backend, x, "e2m1:16").max() == 6


def nvfp4(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The formulas of arXiv 2509.25149, block by block in the types of ml_dtypes."""
    f, y = np.float32, x.copy()
    sizes = np.where(np.isfinite(x), abs(x), np.finfo("float32").max)
    array = max(sizes.max() / f(6) / f(448), f(2.0**-117))
    for i, j in itertools.product(range(0, len(x), rows), range(0, x.shape[1], columns)):
        block = slice(i, i + rows), slice(j, j + columns)
        scale = f((sizes[block].max() / f(6) / array).astype("float8_e4m3fn")) * array
        q = np.clip(x[block] * f(1 / scale), -6, 6) if scale else 0 * x[block]
        z = q.astype("float4_e2m1fn").astype("float32") * f(scale)
        y[block] = np.where(np.isfinite(x[block]), z, x[block])
    return y


@each("rows, block", [(1, 16), (16, 16), (16, 1)])
def test_blocks_with_scales_of_8_bits_are_those_of_the_paper(cpu_backend, rng, rows, block):
    """Among them ties, zeros, scales that are subnormal or 0, short blocks and no finite values."""
    x = rng.normal(size=(37, 70)).astype("float32") * np.exp2(-4.0 * np.arange(70), dtype="float32")
    x[16:32, 16:32], x[20, 40:] = rng.choice([0, 0.25, 0.75, 2.5, 6, 5, 3.5], (16, 16)), 0
    form, scales = NumberFormat.parse("e2m1"), NumberFormat.parse("e4m3fn")
    rounding = Rounding(form, block, stochastic=True, rows=rows, scales=scales)
    for special, scale in itertools.product((1, np.inf, np.nan), (1, 1e-30, 1e-38)):
        x[3, 0] = special
        given, found = x * np.float32(scale), [np.empty_like(x) for _ in range(4)]
        with np.errstate(invalid="ignore"):
            expected, noise = nvfp4(given, rows, block), Noise(3, 5, 1, np.arange(37))
            for out, backend in zip(found, [cpu_backend, REFERENCE] * 2, strict=True):
                rounding.apply(backend, given, out=out, noise=noise if out is found[2] else None)
            rounding.apply(REFERENCE, given, out=found[3], noise=noise)
        np.testing.assert_array_equal(found[0], expected)
        np.testing.assert_array_equal(found[1], expected)
        np.testing.assert_array_equal(found[2], found[3])
    assert np.count_nonzero(expected) < np.count_nonzero(x) < x.size


def test_random_rounding_in_blocks_with_scales_has_no_bias_below_the_largest(cpu_backend):
    x = np.tile(np.random.default_rng(0).normal(size=16).astype("float32"), (20_000, 1))
    x[:, 0] = 6  # the largest: the scale is 1, and no number is out of range
    y = rounded(cpu_backend, x, "e2m1:16:e4m3fn:stochastic", Noise(1, 2, 3, np.arange(len(x))))
    np.testing.assert_allclose(y.mean(0, dtype="float64"), x[0], atol=4 * 0.5 / 20_000**0.5)
    assert len(np.unique(y)) > 5


HADAMARD = np.array([[(-1) ** (i & j).bit_count() / 4 for j in range(16)] for i in range(16)])


def test_the_hadamard_transform_is_that_of_the_matrix_and_its_inverse(cpu_backend, rng):
    signs, x = (rng.choice([-1, 1], shape).astype("float32") for shape in (16, (48, 21)))
    x *= rng.random(x.shape, "float32")
    both = [np.empty((2, *x.shape), "float32") for _ in range(2)]
    for backend, (y, back) in zip((cpu_backend, REFERENCE), both, strict=True):
        backend.elementwise.hadamard(x, signs, out=y)
        backend.elementwise.hadamard(y, signs, out=back, inverse=True)
        np.testing.assert_allclose(back, x, atol=1e-6)
    np.testing.assert_array_equal(*both)
    expected = np.einsum("ij,j,gjc->gic", HADAMARD, signs, x.reshape(3, 16, 21))
    np.testing.assert_allclose(both[0][0], expected.reshape(x.shape), atol=1e-6)


@each(
    "text, reason",
    [
        ("e2m1:e4m3fn", "scales have formats of up to 8 bits, for blocks"),
        ("e2m1:16x16x16", "expected after e2m1 a scale"),
        ("e2m1:16:e5m10", "scales have formats of up to 8 bits, for blocks"),
        ("float8", "expected a format such as"),
        ("e1m2", "exponent must be at least 2"),
        ("e4m23", "mantissa must be at most 22"),
        ("e4m3:rows", "expected after e4m3 a scale"),
        ("e4m3:1", "a block of 2 to"),
        ("e8m7:32", "no scale"),
        ("e8m3fn", "finite must be false"),
    ],
)
def test_what_is_no_format_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        Rounding.parse(text)
