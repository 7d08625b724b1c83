"""Population-based training: networks take over weights and options of better ones while training.

All members of a population are trained for a part of the epochs, a generation, which is a trial
each. Then each of the worst continues from the checkpoint of one of the best, with options that
differ a little (exploit and explore), and the others continue with their own. So options follow a
schedule over the epochs. A generation begins when the one before has ended: the same seed gives the
same schedules for any number of groups, also if they are interrupted.

References
----------
Jaderberg et al.: Population based training of neural networks. arXiv:1711.09846, 2017: truncation
selection, section 4.1; perturbation and resampling, section 4.1.1 and appendix A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from pydtnn.tools.search.dimension import WHO, Dimension, Value, made_of, named
from pydtnn.utils.validate import check_float, check_int

NAME = "pbt"
"""The sampler of a population."""

FACTORS = 0.8, 1.2
"""By one of which a value is multiplied."""


@dataclass(frozen=True)
class Population:
    """The options of the sampler.

    Attributes
    ----------
    population : int
        Members.
    generations : int
        Parts into which the epochs of a member are divided.
    quantile : float
        Share of the members that are replaced, and of those that may replace them; 0 for none.
    resample : float
        Probability that an option has a new value instead of a changed one.
    """

    population: int
    generations: int
    quantile: float = 0.2
    resample: float = 0.25

    def __post_init__(self) -> None:
        who = f"{WHO}: sampler {NAME}"
        check_int(who, "population", self.population, at_least=2)
        check_int(who, "generations", self.generations, at_least=1)
        check_float(who, "quantile", self.quantile, at_least=0, at_most=0.5)
        check_float(who, "resample", self.resample, at_least=0, at_most=1)

    @classmethod
    def of(cls, sampler: Mapping[str, Any]) -> Population | None:
        """Return the population of a sampler with its options; None for other samplers.

        Raises
        ------
        ValueError
            If an option is unknown, missing or wrong.
        """
        if sampler["name"] != NAME:
            return None
        return made_of(cls, "sampler", sampler, "{name: pbt, population: 8, generations: 5}")

    @property
    def trials(self) -> int:
        """Number of trials."""
        return self.population * self.generations

    def part(self, number: int) -> float:
        """Return the share of the epochs after which a trial ends."""
        return (number // self.population + 1) / self.generations

    def before(self, number: int) -> range:
        """Return the trials of the generation before that of a trial."""
        end = number // self.population * self.population
        return range(max(end - self.population, 0), end)


def exploit(
    costs: Sequence[float | None], own: int, quantile: float, generator: np.random.Generator
) -> int | None:
    """Return the member from which a member continues, by truncation selection.

    Parameters
    ----------
    costs : sequence of float or None
        Of each member, the lowest is best; None if it has failed.
    own : int
        The member.
    quantile : float
        Share of the worst, each of which continues from one of as many of the best; a member that
        has failed always does.
    generator : numpy.random.Generator

    Returns
    -------
    int or None
        None if all have failed.

    Examples
    --------
    >>> generator = np.random.default_rng(0)
    >>> [exploit([3.0, 1.0, 2.0, 4.0, 0.5], own, 0.2, generator) for own in range(5)]
    [0, 1, 2, 4, 4]
    """
    number = len(costs)
    ranked = sorted(range(number), key=lambda one: (inf if costs[one] is None else costs[one], one))
    count = min(max(1, round(quantile * number)), number // 2) if quantile else 0
    if costs[own] is not None and own not in ranked[number - count :]:
        return own
    best = [one for one in ranked[: max(count, 1)] if costs[one] is not None]
    return int(generator.choice(best)) if best else None


def explore(
    dimensions: Sequence[Dimension],
    values: Mapping[str, Value],
    resample: float,
    generator: np.random.Generator,
) -> dict[str, Value]:
    """Return options near those of another member.

    A number of a range is multiplied by one of `FACTORS`, and remains in the range. A value is
    drawn anew with probability `resample`, and if it was no part of the other trial; choices change
    only then.

    Parameters
    ----------
    dimensions : sequence of Dimension
    values : mapping
        As a sampler stores them.
    resample : float
    generator : numpy.random.Generator
    """
    found: dict[str, Value] = {}
    for one in dimensions:
        if not one.applies(named(dimensions, found)):
            continue
        factor, anew = generator.choice(FACTORS), generator.random() < resample
        drawn = one.draw(generator)
        if one.name not in values or anew:
            found[one.name] = drawn
        elif one.choices:
            found[one.name] = values[one.name]
        else:
            found[one.name] = one.nearest(float(values[one.name]) * factor)  # type: ignore[arg-type]
    return found
