"""The sentence for a number out of its limits: who, which number, what was expected and given."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def number(
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
        Whose number, and what it is called there: they begin the sentence.
    value : object
        What the user gave.
    at_least, above, at_most, below : float, optional
        Limits, closed and open, from below and from above.

    Raises
    ------
    TypeError
        If `value` is no number.
    ValueError
        If it is not finite or out of the limits.

    Examples
    --------
    >>> number("SGD", "momentum", 0.9, at_least=0, below=1)
    0.9
    >>> number("SGD", "momentum", 1.5, at_least=0, below=1)
    Traceback (most recent call last):
    ValueError: SGD: momentum must be at least 0 and below 1, not 1.5
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{who}: {name} must be a number, not {value!r}")
    try:
        given = float(value)
    except OverflowError:  # of a whole number, which is refused as infinity is
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
        raise ValueError(f"{who}: {name} must be {expected}, not {value}")
    return given


def whole(who: str, name: str, value: Any, *, at_least: int, at_most: int | None = None) -> int:
    """Return `value` as an int if it is a whole number within the limits.

    Raises
    ------
    TypeError
        If `value` is no whole number.
    ValueError
        If it is too small or too large.

    Examples
    --------
    >>> whole("Cosine", "steps", 0, at_least=1)
    Traceback (most recent call last):
    ValueError: Cosine: steps must be at least 1, not 0
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{who}: {name} must be a whole number, not {value!r}")
    if value < at_least or (at_most is not None and int(value) > at_most):
        limit = "" if at_most is None else f" and at most {at_most}"
        raise ValueError(f"{who}: {name} must be at least {at_least}{limit}, not {value}")
    return int(value)
