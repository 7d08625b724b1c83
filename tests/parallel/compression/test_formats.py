from __future__ import annotations

import numpy as np

from pydtnn.parallel.compression.floats import CHUNK_ELEMENTS, CodedFormat
from tests.each import each

FORMATS = [(2, 1), (3, 2), (4, 3), (5, 2), (2, 9), (6, 5), (7, 3), (5, 10), (8, 7), (8, 1)]
REALS = ["float32", "float64"]


def value(form: CodedFormat, code: int) -> float:
    """What IEEE 754 (section 3.4) says that a code without sign means."""
    exponent, mantissa = divmod(code, 2**form.mantissa)
    if exponent == 0:
        return mantissa * 2.0 ** (1 - form.bias - form.mantissa)
    return (1 + mantissa * 2.0**-form.mantissa) * 2.0 ** (exponent - form.bias)


def nearest(form: CodedFormat, x: np.ndarray) -> np.ndarray:
    """The codes of the nearest numbers, ties to even, found by looking at all."""
    numbers = np.array([value(form, code) for code in range(form.infinity)])
    size = np.minimum(np.abs(x.astype("float64")), numbers[-1])
    above = np.searchsorted(numbers, size)
    below = np.maximum(above - 1, 0)
    up, down = numbers[above] - size, size - numbers[below]
    even = np.where(above % 2 == 0, above, below)
    codes = np.where(up < down, above, np.where(down < up, below, even))
    return codes + np.signbit(x) * 2 ** (form.width - 1)


def samples(form: CodedFormat, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Numbers of all sizes, all numbers of a small format, and what lies half way between."""
    codes = np.unique(rng.integers(0, form.infinity, 2000))
    numbers = np.array([value(form, code) for code in [*codes, form.infinity - 1]])
    between = (numbers[1:] + numbers[:-1]) / 2
    if form.width <= 9:  # `codes` are all of them, so these are ties
        assert len(numbers) >= form.infinity
    wide = rng.normal(size=3000) * 2.0 ** rng.uniform(-form.bias - 12, form.bias + 3, 3000)
    everything = np.concatenate([numbers, between, wide, [0.0, 1e-300]])
    tiny = np.finfo(dtype).tiny
    with np.errstate(over="ignore", under="ignore"):
        x = np.concatenate([everything, -everything]).astype(dtype)
        near = [np.nextafter(x, np.array(end, dtype)) for end in (0, np.inf)]
    x = np.concatenate([x, *near, np.array([tiny / 8], dtype)])
    return x[np.isfinite(x)]


@each("dtype", REALS)
@each("bits", FORMATS)
def test_encode_finds_the_nearest_number_with_ties_to_even(bits, dtype, rng):
    form = CodedFormat(*bits)
    x = samples(form, dtype, rng)
    np.testing.assert_array_equal(form.encode(x), nearest(form, x))


@each("dtype", REALS)
@each("bits", [*FORMATS, (5, 17), (8, 22)])
def test_decode_means_what_the_standard_says(bits, dtype, rng):
    form = CodedFormat(*bits)
    codes = np.unique(np.append(rng.integers(0, form.infinity, 3000), [0, 1, form.infinity - 1]))
    with np.errstate(over="ignore"):
        expected = np.array([value(form, code) for code in codes.tolist()]).astype(dtype)
    for sign, places in ((1, 0), (-1, 2 ** (form.width - 1))):
        given = form.decode((codes + places).astype("uint32"), np.dtype(dtype))
        assert given.dtype == dtype
        np.testing.assert_array_equal(given, sign * expected)


@each("dtype", REALS)
@each("bits", [*FORMATS, (8, 22)])
def test_what_is_finite_stays_so_and_what_is_not_stays_that(bits, dtype):
    form, kind = CodedFormat(*bits), np.dtype(dtype)
    greatest = float(np.finfo(dtype).max)
    x = np.array([greatest, -greatest, np.inf, -np.inf, np.nan, -0.0, 1], dtype)
    y = form.decode(form.encode(x), kind)
    largest = min(form.largest, greatest)
    np.testing.assert_array_equal(y[:4], np.array([largest, -largest, np.inf, -np.inf], dtype))
    assert np.isnan(y[4])
    assert np.signbit(y[5])
    assert y[6] == 1


@each(
    "size", [0, 1, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 2 * CHUNK_ELEMENTS + 17]
)
def test_arrays_of_any_length_are_rounded_as_float16(size, rng):
    x = rng.normal(size=size).astype("float32")
    np.testing.assert_array_equal(CodedFormat(5, 10).encode(x), x.astype("float16").view("uint16"))


@each("dtype", REALS)
@each("bits", [(5, 17), (8, 22), (3, 20)])
def test_long_formats_are_within_half_a_unit(bits, dtype, rng):
    form = CodedFormat(*bits)
    x = rng.uniform(-2, 2, 5000).astype(dtype)
    y = form.decode(form.encode(x), np.dtype(dtype))
    unit = 2.0 ** (np.maximum(np.frexp(x)[1] - 1, 1 - form.bias) - form.mantissa)
    assert (np.abs(y.astype("float64") - x) <= unit / 2).all()
