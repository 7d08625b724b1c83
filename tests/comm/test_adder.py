"""Sums in C: the same bits as the reference, for every instruction set and all 16-bit values."""

import ml_dtypes
import numpy as np
import pytest

from pydtnn.comm.schedules import executor
from pydtnn.comm.schedules.executor import COMPILED, add, adder_for
from tests.each import each

_sum = pytest.importorskip("pydtnn.comm._sum", reason="the extension is not built")

TYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in COMPILED}
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 1013, 40_009)
"""Around the lengths of vectors; a prime; long enough for the interpreter's lock to be released."""


@pytest.fixture(params=_sum.available())
def isa(request):
    return request.param


def bits(x: np.ndarray) -> np.ndarray:
    """The elements as integers, those that are no numbers all alike."""
    nan = np.isnan(x.astype("float64"))
    return np.where(nan, -1, x.view(f"int{8 * x.itemsize}"))


def check(name: str, isa: int, x: np.ndarray, y: np.ndarray) -> None:
    expected = x.copy()
    add(expected, y)
    _sum.Adder(name, isa)(x, y)
    np.testing.assert_array_equal(bits(x), bits(expected))


@each("name", COMPILED)
def test_sums_are_those_of_the_reference(name, isa, rng):
    for size in SIZES:
        x, y = (rng.standard_normal(size).astype(TYPES[name]) for _ in range(2))
        check(name, isa, x, y)


@each("name", COMPILED)
def test_arrays_may_begin_anywhere(name, isa, rng):
    for begin in (1, 3):
        x, y = (rng.standard_normal(100).astype(TYPES[name]) for _ in range(2))
        check(name, isa, x[begin:], y[begin:])


@each("name", ["float16", "bfloat16"])
def test_every_value_of_16_bits_is_added_as_in_the_reference(name, isa, rng):
    values = np.arange(2**16, dtype="uint16").view(TYPES[name])
    near = np.roll(values, 1)
    for other in (np.zeros_like(values), values, near, *(rng.permutation(values) for _ in "123")):
        check(name, isa, values.copy(), other)


@each(
    ("name", "x", "y", "total"),
    [
        ("float16", 2048, 1, 2048),  # half way between 2048 and 2050: to the even mantissa
        ("float16", 2050, 1, 2052),
        ("float16", 65504, 16, np.inf),  # half way between the largest number and the next
        ("float16", 65504, 15, 65504),
        ("float16", 2**-24, 2**-24, 2**-23),  # below the least normal number
        ("bfloat16", 256, 1, 256),
        ("bfloat16", 258, 1, 260),
        ("bfloat16", 3.3895e38, 3.3895e38, np.inf),
        ("float32", 2**24, 1, 2**24),
        ("float16", np.inf, -np.inf, np.nan),
        ("bfloat16", np.nan, 1, np.nan),
    ],
)
def test_sums_are_rounded_to_nearest_even(name, isa, x, y, total):
    for size in (1, 16):  # in the loop of single elements, and in that of vectors
        into = np.full(size, x, TYPES[name])
        _sum.Adder(name, isa)(into, np.full(size, y, TYPES[name]))
        np.testing.assert_array_equal(into.astype("float64"), total)


def test_integers_are_added_by_numpy():
    x = np.array([2**62, -1, 5])
    adder_for(x.dtype)(x, np.array([2**62 - 1, 1, -7]))
    assert x.tolist() == [2**63 - 1, 0, -2]


def test_the_reference_adds_where_nothing_is_built(monkeypatch):
    monkeypatch.setattr(executor, "_sum", None)
    assert adder_for(np.dtype("float32")) is add


@each(
    "arrays",
    [
        lambda x: (x, x[:2]),
        lambda x: (x, x.astype("float64")),
        lambda x: (x[::2], x[::2]),
        lambda x: (np.broadcast_to(x[0], 3), x),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays):
    with pytest.raises(ValueError, match="a sum needs two contiguous arrays"):
        _sum.Adder("float32")(*arrays(np.ones(3, "float32")))


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="no compiled sum of elements of type int8"):
        _sum.Adder("int8")
