"""Validation of numbers: errors contain owner, name, expected range and the given value."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SEED = 2**64 - 1
"""Default maximum of whole numbers."""


def check_float(
    who: str,
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> float:
    """Return `value` as a float if it is a finite number within the limits.

    Parameters
    ----------
    who, name : str
        Owner and name of the number, the first words of error messages.
    value : object
        Value to check.
    at_least, above, at_most, below : float, optional
        Closed and open lower limit, closed and open upper limit.

    Raises
    ------
    TypeError
        If `value` is not a number.
    ValueError
        If `value` is not finite or out of range.

    Examples
    --------
    >>> check_float("SGD", "momentum", 0.9, at_least=0, below=1)
    0.9
    >>> check_float("SGD", "momentum", 1.5, at_least=0, below=1)
    Traceback (most recent call last):
    ValueError: SGD: momentum must be at least 0 and below 1, got 1.5
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{who}: {name} must be a number, got {value!r}")
    try:
        given = float(value)
    except OverflowError:  # an integer beyond the range of floats
        given = math.inf
    if (
        not math.isfinite(given)
        or (at_least is not None and given < at_least)
        or (above is not None and given <= above)
        or (at_most is not None and given > at_most)
        or (below is not None and given >= below)
    ):
        limits = [
            f"{words} {limit}"
            for words, limit in (
                ("at least", at_least),
                ("above", above),
                ("at most", at_most),
                ("below", below),
            )
            if limit is not None
        ]
        expected = " and ".join(limits) or "a finite number"
        raise ValueError(f"{who}: {name} must be {expected}, got {value}")
    return given


def check_int(who: str, name: str, value: Any, *, at_least: int, at_most: int = MAX_SEED) -> int:
    """Return `value` as an int if it is a whole number from `at_least` to `at_most`.

    Raises
    ------
    TypeError
        If `value` is not a whole number.
    ValueError
        If `value` is too small or too large.

    Examples
    --------
    >>> check_int("Cosine", "steps", 0, at_least=1)
    Traceback (most recent call last):
    ValueError: Cosine: steps must be at least 1, got 0
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{who}: {name} must be a whole number, got {value!r}")
    if value < at_least:
        raise ValueError(f"{who}: {name} must be at least {at_least}, got {value}")
    if int(value) > at_most:
        raise ValueError(f"{who}: {name} must be at most {at_most}, got {value}")
    return int(value)


def check_bool(who: str, name: str, value: Any) -> bool:
    """Return `value` if it is true or false.

    Raises
    ------
    TypeError
        If `value` is anything else, including 1 or "false", which would convert to True.

    Examples
    --------
    >>> check_bool("SGD", "nesterov", "no")
    Traceback (most recent call last):
    TypeError: SGD: nesterov must be true or false, got 'no'
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{who}: {name} must be true or false, got {value!r}")
    return bool(value)


def check_names(made: object, base: type) -> None:
    """Raise TypeError if an attribute of an object has the name of a method of its base class."""
    for name in dir(base):
        if name[0] != "_" and callable(getattr(base, name)) and not callable(getattr(made, name)):
            raise TypeError(
                f"{type(made).__name__}: {name} is a method of {base.__name__}, got an attribute, "
                f"{getattr(made, name)!r:.40}; use another name"
            )


def plain_array(who: str, name: str, value: Any) -> NDArray[Any]:
    """Return a value as an array of one shape without a mask; tensors of PyTorch are converted.

    Raises
    ------
    TypeError
        If it is a masked array, or contains some: their masks would be lost.
    ValueError
        If it is a list of arrays of different shapes.

    Examples
    --------
    >>> plain_array("ArrayDataset", "x", [[1, 2], [3]])
    Traceback (most recent call last):
    ValueError: ArrayDataset: x must have samples of one shape, got different ones; pad ...
    """
    items = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, np.ma.MaskedArray) for item in items):
        use = f"use {name}.filled(number), and ignore_index for labels"
        raise TypeError(f"{who}: {name} must be an array without a mask, got one of np.ma; {use}")
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
        ragged = array.dtype == object and array.ndim == 1 and len({*map(np.shape, array)}) > 1
    except ValueError:
        ragged = True
    if ragged:
        use = "pad them, and pass their lengths as a second input of layers such as attention"
        raise ValueError(f"{who}: {name} must have samples of one shape, got different ones; {use}")
    return array
