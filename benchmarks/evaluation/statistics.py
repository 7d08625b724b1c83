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

from benchmarks.common.pages import LEVEL, Interval

SIGNIFICANT = 0.001
"""Probability of a difference at least as large between equal programs, below which it counts: of
1,000 comparisons of equal programs, one is expected to be called different."""


def mean(values: Iterable[float]) -> Interval:
    """Return the mean with an interval by Student's t."""
    own = np.array([*values])
    middle = float(own.mean())
    if len(own) < 2:
        return Interval(middle, middle, middle)
    half = stats.t.ppf((1 + LEVEL) / 2, len(own) - 1) * own.std(ddof=1) / np.sqrt(len(own))
    return Interval(middle, middle - half, middle + half)


class Comparison(NamedTuple):
    """How many times as long the first program takes as the second, and how sure that is.

    Attributes
    ----------
    ratio : Interval
        Geometric mean of the pairs' ratios.
    p : float
        Probability of such a mean, or a larger one, between equal programs: the paired t test.
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
    return _compared(np.log(first) - np.log(second))


def compare_cells(cells: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Comparison:
    """Compare two programs in several experiments, such as networks and numbers of ranks.

    Times of short steps vary more than those of long ones. For the t test, the logarithms of each
    experiment's ratios are therefore divided by their root mean square, which does not depend on
    which of two equal programs was first. In 400,000 simulated comparisons of equal programs by
    six experiments of five pairs, 0.0012 had a p below 0.001.

    Parameters
    ----------
    cells : sequence of pairs of sequences
        Of each experiment the times of both programs, in pairs.

    References
    ----------
    Efron: Student's t-test under symmetry conditions. J. Am. Stat. Assoc. 64, 1969.
    """
    logs = [np.log(first) - np.log(second) for first, second in cells]
    scaled = [own / (np.sqrt(np.mean(own**2)) or 1.0) for own in logs]
    ratio, _, pairs = _compared(np.concatenate(logs))
    return Comparison(ratio, _compared(np.concatenate(scaled)).p, pairs)


def _compared(logs: np.ndarray) -> Comparison:
    if not logs.any():
        return Comparison(Interval(1.0, 1.0, 1.0), 1.0, len(logs))
    p = float(stats.ttest_1samp(logs, 0.0).pvalue) if len(logs) > 1 else 1.0
    return Comparison(Interval(*np.exp(mean(logs))), p, len(logs))


def threshold(first: Sequence[float], second: Sequence[float], pairs: int) -> float:
    """Return the relative difference that so many pairs find significant every second time.

    Parameters
    ----------
    first, second : sequence of float
        Times of two programs in pairs, from whose ratios the variation is estimated.
    pairs : int
    """
    spread = np.std(np.log(first) - np.log(second), ddof=1)
    return float(stats.t.ppf(1 - SIGNIFICANT / 2, pairs - 1) * spread / np.sqrt(pairs))


def variation(
    cells: Mapping[tuple[str, ...], Sequence[float]], names: Sequence[str]
) -> dict[str, float]:
    """Return the share of the variation that each factor, interaction, and the error explain.

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
    shares["error"] = max(1 - sum(shares.values()), 0.0)
    return shares
