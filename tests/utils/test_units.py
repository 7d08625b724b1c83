"""Quantities with units."""

import pytest

from pydtnn.utils.units import format_quantity, parse_quantity
from tests.each import each


@each(
    ("text", "unit", "value"),
    [
        ("50 us", "s", 50e-6),
        ("2 min", "s", 120.0),
        ("50 \N{MICRO SIGN}s", "s", 50e-6),
        ("1 Gbit/s", "B/s", 125e6),
        ("100 Gbps", "B/s", 12.5e9),
        ("100Gb/s", "B/s", 12.5e9),
        ("125 MB/s", "B/s", 125e6),
        ("1 MiB/s", "B/s", 1048576.0),
        ("2 KiB", "B", 2048.0),
        ("16 GiB", "B", 2.0**34),
        ("7.8 Tflop/s", "flop/s", 7.8e12),
    ],
)
def test_a_number_with_a_unit_is_converted_to_si(text, unit, value):
    assert parse_quantity("x", text, unit) == value


@each(
    "value",
    ["50", 50, 1.5, "us", "", None, True, [1], "5 Gb/s", "5 GB", "1 2 us", "nan us", "0x5 us"],
)
def test_anything_but_a_number_with_a_known_unit_is_refused(value):
    with pytest.raises(ValueError, match=r"^link: expected a number with a unit \(ns, us, ms, s"):
        parse_quantity("link", value, "s")


@each(
    ("text", "advice"),
    [
        (100, "write 100 GB/s or 100 Gbit/s"),
        ("100 gbps", "write 100 Gbps"),
        ("100 Gbits/s", "write 100 Gbit/s"),
        ("100 gb/S", "write 100 G[bB]/s"),
    ],
)
def test_advice_keeps_bits_apart_from_bytes(text, advice):
    with pytest.raises(ValueError, match=rf"; {advice}$"):
        parse_quantity("link", text, "B/s")


def test_quantities_are_finite_and_above_0_unless_zero_is_allowed():
    for text in ("-1 us", "0 us", "1e999 s"):
        with pytest.raises(ValueError, match="x: expected a finite quantity above 0, got"):
            parse_quantity("x", text, "s")
    assert parse_quantity("x", "0 us", "s", positive=False) == 0.0


@each(
    ("value", "unit", "text"),
    [
        (5e-5, "s", "50 us"),
        (3.2e-10, "s", "0.32 ns"),
        (125e6, "B/s", "125 MB/s"),
        (0.99999e9, "B/s", "1 GB/s"),
        (1.23456e13, "flop/s", "12.35 Tflop/s"),
        (0.0, "s", "0 s"),
    ],
)
def test_quantities_are_written_with_the_largest_unit_in_which_they_are_at_least_1(
    value, unit, text
):
    assert format_quantity(value, unit) == text
    assert parse_quantity("x", text, unit, positive=False) == pytest.approx(value, rel=1e-3)


@each(
    ("text", "size"),
    [("7B", 7), ("2GiB", 2 << 30), ("2 GB", 2 * 10**9), ("0.5 KiB", 512), (" 3TiB ", 3 << 40)],
)
def test_units_are_powers_of_1000_or_1024(text, size):
    assert parse_quantity("limit", text, "B") == size


@each("text", ["", "GiB", "-1 B", "1", "2XB", "0 B", "2G", "3iB", "1 2"])
def test_other_words_are_refused(text):
    with pytest.raises(ValueError, match="^limit: expected a "):
        parse_quantity("limit", text, "B")
