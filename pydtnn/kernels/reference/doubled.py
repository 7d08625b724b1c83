"""Sums of doubles in two parts each, for data with a mean far larger than the deviation.

``sum x^2 / n - mean^2`` loses the square of mean / deviation: none of 16 digits is correct if that
is 1e8. Sums in two parts have 79 bits, 24 digits. The first part has 26 of them, so that up to a
hundred million such sums, of shards and ranks, add up without an error, element by element and in
any order, as other sums do.

References
----------
Dekker, "A Floating-Point Technique for Extending the Available Precision", 1971; Ogita, Rump and
Oishi, "Accurate Sum and Dot Product", 2005 (`total` is their Sum2).
"""

from __future__ import annotations

from typing import Any

Array = Any


def split(x: Array) -> tuple[Array, Array]:
    """Split `x` into a part of 26 bits and the rest."""
    high = x * 134217729.0  # 2^27 + 1
    high = high - (high - x)
    return high, x - high


def product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return ``a b`` as a double and its error."""
    value = a * b
    (a, a_rest), (b, b_rest) = split(a), split(b)
    return value, ((a * b - value) + a * b_rest + a_rest * b) + a_rest * b_rest


def total(first: Array, *others: Array) -> tuple[Array, Array]:
    """Return the sum of all as a double and its error."""
    high, low = first, 0.0
    for x in others:
        value = high + x
        taken = value - high
        low = low + ((high - (value - taken)) + (x - taken))
        high = value
    value = high + low
    return value, low - (value - high)


def about_zero(
    count: float, pivot: Array, offsets: Array, squares: Array
) -> tuple[Array, Array, Array, Array]:
    """Convert sums about a pivot to sums about zero.

    Parameters
    ----------
    count : float
        Number of rows.
    pivot : Array, shape (C,)
    offsets, squares : Array, shape (C,)
        ``sum (x - pivot)`` and ``sum (x - pivot)^2``.

    Returns
    -------
    tuple of Array, shape (C,)
        The first parts of ``sum x`` and ``sum x^2``, then their second parts.
    """
    square, rest = product(pivot, pivot)
    x, x_rest = total(*product(count + 0 * pivot, pivot), offsets)
    xx, xx_rest = total(
        *product(count + 0 * pivot, square),
        *product(2 * pivot, offsets),
        count * rest,
        squares,
    )
    (x, x_more), (xx, xx_more) = split(x), split(xx)
    return x, xx, x_more + x_rest, xx_more + xx_rest


def moments(
    count: Array, x: Array, xx: Array, x_rest: Array, xx_rest: Array
) -> tuple[Array, Array]:
    """Return mean and variance from the result of `about_zero`; it may be slightly below zero."""
    mean = (x + x_rest) / count
    square, rest = product(mean, mean)
    cross, cross_rest = product(2 * mean, x)
    squares, _ = total(
        *(xx, -cross, *product(count + 0 * mean, square)),
        *(xx_rest, -cross_rest, -2 * mean * x_rest, count * rest),
    )
    shift, shift_rest = product(count + 0 * mean, mean)
    offset, _ = total(x, -shift, x_rest, -shift_rest)
    return mean, squares / count - (offset / count) ** 2
