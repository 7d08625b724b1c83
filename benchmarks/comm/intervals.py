"""Means of repeated measurements with the interval in which the true one lies, 95 times in 100."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t that is exceeded in 2.5 % of cases, by degrees of freedom from 1."""


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def divided(self, by: float) -> Interval:
        """The interval of what is measured, divided by a number."""
        return Interval(self.mean / by, self.low / by, self.high / by)


def student_t(freedom: int) -> float:
    """Student's t that is exceeded in 2.5 % of cases.

    References
    ----------
    Abramowitz, Stegun, Handbook of mathematical functions, 1964, 26.7.5, for more than ten degrees
    of freedom.
    """
    if freedom <= len(T):
        return T[freedom - 1]
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def geometric(values: Sequence[float]) -> Interval:
    """Geometric mean of positive numbers, such as rates and ratios, by Student's t of their logs.

    A single value has an interval without ends.
    """
    logs = [log(value) for value in values]
    mean = fmean(logs)
    if len(logs) == 1:
        return Interval(exp(mean), 0.0, inf)
    half = student_t(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return Interval(exp(mean), exp(mean - half), exp(mean + half))
