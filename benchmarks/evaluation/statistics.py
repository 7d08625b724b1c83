"""Intervals, paired comparisons, and the variation that each factor explains.

References
----------
Jain, "The Art of Computer Systems Performance Analysis", 1991, chapters 13 and 16 to 23; Hoefler
and Belli, "Scientific benchmarking of parallel computing systems", SC 2015.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks.common.pages import LEVEL, MIN_VALUES, Interval

SIGNIFICANT = 0.001
"""Probability of a difference at least as large between equal programs, below which it counts: of
1,000 comparisons of equal programs, at most one is expected to be called different."""

MIN_PAIRS = 5
"""Pairs of a test. A star requires at least 11, because 2 of 2**n choices of signs have the largest
sum."""

POWER, DRAWS = 0.8, 200
"""Of `detectable`: the share of experiments in which a difference is found, and their number."""

STEPS = 20_000
"""Steps of the sum that `sign_test` distinguishes."""


def mean(values: Iterable[float]) -> Interval:
    """Return the mean with an interval by Student's t, from three values on."""
    own = np.array([*values])
    middle = float(own.mean())
    if len(own) < MIN_VALUES:
        return Interval(middle, np.nan, np.nan)
    half = stats.t.ppf((1 + LEVEL) / 2, len(own) - 1) * own.std(ddof=1) / np.sqrt(len(own))
    return Interval(middle, middle - half, middle + half)


class Comparison(NamedTuple):
    """How many times as long the first program takes as the second, and how sure that is.

    Attributes
    ----------
    ratio : Interval
        Geometric mean of the pairs' ratios.
    p : float
        Probability of such a mean, or a larger one, between equal programs; NaN if there are fewer
        than `MIN_PAIRS` pairs.
    pairs : int
    """

    ratio: Interval
    p: float
    pairs: int

    @property
    def significant(self) -> bool:
        """Whether the difference counts."""
        return self.p < SIGNIFICANT


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare times of two programs that were measured in pairs, such as those of a repetition."""
    return compare_cells([(first, second)])


def compare_cells(cells: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Comparison:
    """Compare two programs in several experiments, such as networks and numbers of ranks.

    Times of short steps vary more than those of long ones. The logarithms of each experiment's
    ratios are therefore divided by their root mean square, and their sum is compared with the sums
    for all choices of signs. For equal programs, the order of a pair is arbitrary, whatever the
    times and their variation; the root mean square does not depend on it. The test is therefore
    exact for any number of experiments and pairs.

    Parameters
    ----------
    cells : sequence of pairs of sequences
        Of each experiment the times of both programs, in pairs.

    References
    ----------
    Fisher: The Design of Experiments, 1935, section 21.
    """
    logs = [np.log(first) - np.log(second) for first, second in cells]
    each = np.concatenate(logs)
    return Comparison(Interval(*np.exp(mean(each))), _p(logs), len(each))


def _p(logs: Sequence[np.ndarray]) -> float:
    scaled = [own / (np.sqrt(np.mean(own**2)) or 1.0) for own in logs]
    return sign_test(np.concatenate(scaled))


def sign_test(values: np.ndarray) -> float:
    """Return the share of all choices of signs whose sum is at least as far from 0.

    Values are rounded to whole multiples of 1 / `STEPS` of the sum of their magnitudes, so that
    the distribution of the sums is counted exactly.
    """
    if len(values) < MIN_PAIRS:
        return float("nan")
    total = abs(values).sum()
    weights = np.rint(values * (STEPS / total if total else 0)).astype(int)
    share = np.zeros(abs(weights).sum() + 1)  # of the choices, by the sum of the positive values
    share[0] = 1.0
    for weight in abs(weights[weights != 0]):
        share /= 2
        share[weight:] += share[:-weight].copy()
    sums = 2 * np.arange(len(share)) - (len(share) - 1)
    return min(float(share[abs(sums) >= abs(weights.sum())].sum()), 1.0)


def detectable(cells: Sequence[tuple[Sequence[float], Sequence[float]]], pairs: int = 0) -> float:
    """Return the smallest ratio that `compare_cells` finds significant with a power of 80 %.

    The test is applied to `DRAWS` experiments whose logarithms of ratios are normal, with the
    standard deviation of each cell. Infinite if the pairs are too few for a significant difference,
    or if a cell has no second pair.

    Parameters
    ----------
    cells : sequence of pairs of sequences
        As in `compare_cells`; their variation is estimated from them.
    pairs : int, default 0
        Of each cell of the experiments; 0: as many as it has here.
    """
    logs = [np.log(first) - np.log(second) for first, second in cells]
    counts = [pairs or len(own) for own in logs]
    if 2.0 ** (1 - sum(counts)) >= SIGNIFICANT or min(map(len, logs)) < 2:
        return float("inf")
    rng, spreads = np.random.default_rng(0), [np.std(own, ddof=1) for own in logs]
    noise = [
        [spread * rng.standard_normal(count) for spread, count in zip(spreads, counts, strict=True)]
        for _ in range(DRAWS)
    ]
    low, high = 0.0, 10 * max(spreads)  # with which all signs are the same
    for _ in range(10):
        middle = (low + high) / 2
        found = sum(_p([own + middle for own in drawn]) < SIGNIFICANT for drawn in noise)
        low, high = (low, middle) if found >= POWER * DRAWS else (middle, high)
    return float(np.exp(high))


def variation(
    cells: Mapping[tuple[str, ...], Sequence[float]], names: Sequence[str]
) -> dict[str, float]:
    """Return the share of the variation that each factor, interaction, and the error explain.

    Without repetitions, the error is part of the interaction of all factors, and is not returned.

    Parameters
    ----------
    cells : mapping
        The observations of each combination of levels, as many of each: a full factorial design.
    names : sequence of str
        Of the factors.

    Raises
    ------
    ValueError
        If combinations are missing, or have different numbers of observations.
    """
    levels = [sorted({cell[i] for cell in cells}) for i in range(len(names))]
    shape = tuple(map(len, levels))
    counts = {len(values) for values in cells.values()}
    if len(cells) != np.prod(shape) or len(counts) != 1 or 0 in counts:
        raise ValueError("variation: expected as many observations of every combination of levels")
    (count,) = counts
    y = np.empty((*shape, count))
    for cell, values in cells.items():
        y[tuple(own.index(level) for own, level in zip(levels, cell, strict=True))] = values
    total = float(((y - y.mean()) ** 2).sum())
    axes = range(len(names))
    effects: dict[tuple[int, ...], np.ndarray] = {(): np.asarray(y.mean())}
    shares = {}
    for number in range(1, len(names) + 1):
        for kept in combinations(axes, number):
            others = tuple(i for i in range(y.ndim) if i not in kept)
            effect = y.mean(axis=others, keepdims=True)
            for inner, value in effects.items():
                if set(inner) < set(kept):
                    effect = effect - value
            effects[kept] = effect
            squares = float((effect**2).sum()) * y.size / effect.size
            shares[" x ".join(names[i] for i in kept)] = squares / total if total else 0.0
    if count > 1:
        shares["error"] = max(1 - sum(shares.values()), 0.0)
    return shares
