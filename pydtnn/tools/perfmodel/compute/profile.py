"""Measured times of the segments of the steps of ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, cycle

import numpy as np

from pydtnn.layers.base import Layer
from pydtnn.tools.perfmodel.compute.base import ComputeCosts, Label


@dataclass(frozen=True)
class RankProfile:
    """Times of one rank.

    Attributes
    ----------
    steps : tuple of mapping
        For each measured step the mean time of each segment, in s.
    samples : int
        Samples of each pass: those of the rank's part of a batch, or of a micro-batch.
    away : float
        Part of the time in which the rank had no core, because of other work.
    """

    steps: tuple[Mapping[Label, float], ...]
    samples: int
    away: float = 0.0

    @property
    def times(self) -> dict[Label, list[float]]:
        """The times of each segment in the steps that have it, in s."""
        found = defaultdict[Label, list[float]](list)
        for label, seconds in chain.from_iterable(step.items() for step in self.steps):
            found[label].append(seconds)
        return found

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the sum of all segments, over its median.

        0 for less than two steps.
        """
        sums = [sum(step.values()) for step in self.steps]
        if len(sums) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(sums, n=4, method="inclusive")
        return (high - low) / 2 / middle


@dataclass(frozen=True)
class Profile:
    """Times of all ranks of a workload on a machine."""

    ranks: tuple[RankProfile, ...]

    @property
    def spread(self) -> float:
        """The largest spread of a rank: see `RankProfile.spread`."""
        return max(rank.spread for rank in self.ranks)

    def deciles(self) -> tuple[float, float]:
        """Return the first and the last decile of the steps' times, relative to their median."""
        low, middle, high = np.quantile(self._lengths(), [0.1, 0.5, 0.9]).tolist()
        return low / middle, high / middle

    def _lengths(self) -> list[float]:
        """Return the time of each step on its slowest rank, in s."""
        steps = zip(*(own.steps for own in self.ranks), strict=True)
        return [max(sum(own.values()) for own in one) for one in steps]

    def typical(self, number: int) -> Profile:
        """Return the profile with as many steps as possible of that number, those in the middle.

        Steps are ordered by the time of their slowest rank. Two of three that are left out are the
        longest ones: other work on the machine lengthens steps, for seconds at a time.
        """
        lengths = self._lengths()
        first = max(len(lengths) - number, 0) // 3
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        kept = sorted(order[first : first + number])
        ranks = (replace(own, steps=tuple(own.steps[i] for i in kept)) for own in self.ranks)
        return Profile(tuple(ranks))


class MeasuredCosts(ComputeCosts):
    """The times of a rank.

    Passes of another number of samples than the measured ones, as in evaluation and of the shards
    of exact training, take times in proportion to it.

    Parameters
    ----------
    profile : RankProfile
    varying : bool
        Whether the n-th execution of a segment takes the time of the n-th measured step instead of
        the median. Ranks that wait for each other then wait for the slower one of each part, as in
        a real run. An object is for one run.

    Raises
    ------
    ValueError
        From `seconds`, if the layer is not one of the network that was measured.
    """

    def __init__(self, profile: RankProfile, *, varying: bool = False) -> None:
        self._times = {
            label: cycle(own if varying else [statistics.median(own)])
            for label, own in profile.times.items()
        }
        self._nodes = {label.name for label in self._times}
        self._samples = profile.samples

    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        """Return the time of a segment, in s; 0 of a phase that the measured steps did not have."""
        found = self._times.get(label)
        if found is None and label.kind != "phase" and label.name not in self._nodes:
            raise ValueError(
                f"MeasuredCosts: expected a layer of the measured network, got {label.name}; "
                "measure this network with this plan"
            )
        if found is None:
            return 0.0
        return next(found) * (1 if label.kind == "phase" else batch / self._samples)
