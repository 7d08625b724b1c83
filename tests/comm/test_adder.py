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
        for begin in (0, 1, 3):  # arrays may begin anywhere
            x, y = (rng.standard_normal(size + begin).astype(TYPES[name]) for _ in range(2))
            check(name, isa, x[begin:], y[begin:])


@each("name", ["float16", "bfloat16"])
def test_every_value_of_16_bits_is_added_as_in_the_reference(name, isa, rng):
    values = np.arange(2**16, dtype="uint16").view(TYPES[name])
    near = np.roll(values, 1)
    for other in (np.zeros_like(values), values, near, *(rng.permutation(values) for _ in "123")):
        check(name, isa, values.copy(), other)


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
def test_arrays_and_types_that_do_not_fit_are_refused(arrays):
    with pytest.raises(ValueError, match="two contiguous arrays"):
        _sum.Adder("float32")(*arrays(np.ones(3, "float32")))
    with pytest.raises(ValueError, match="type int8"):
        _sum.Adder("int8")
