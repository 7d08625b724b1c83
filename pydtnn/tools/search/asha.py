"""Successive halving without waiting (ASHA): trials are paused, and the best ones continue.

A trial is paused at its first rung, after `min_resource` epochs, and then after `reduction_factor`
times as many each. Whenever a group of ranks is free, a paused trial that is among the best
1/`reduction_factor` of its rung continues to the next one; if there is none, a new trial begins.
Until all trials have begun, no more than this part of a rung continues. Otherwise a sampler that
improves would have most of its trials continued, because each is among the best of those before it.

References
----------
L. Li et al.: A system for massively parallel hyperparameter tuning. MLSys 2020, algorithm 2.
Y. Li et al.: Hyper-Tune: towards efficient hyper-parameter tuning at scale. VLDB 2022, D-ASHA.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydtnn.tools.search.dimension import WHO, made_of
from pydtnn.utils.validate import check_int

NAME = "asha"
"""The pruner."""


@dataclass(frozen=True)
class Halving:
    """The options of the pruner.

    Attributes
    ----------
    min_resource : int
        Epochs of the first rung.
    reduction_factor : int
        One of so many trials of a rung continues, to so many times the epochs.
    """

    min_resource: int = 3
    reduction_factor: int = 3

    def __post_init__(self) -> None:
        who = f"{WHO}: pruner {NAME}"
        check_int(who, "min_resource", self.min_resource, at_least=1)
        check_int(who, "reduction_factor", self.reduction_factor, at_least=2)

    @classmethod
    def of(cls, pruner: Mapping[str, Any]) -> Halving | None:
        """Return the options of a pruner; None for other ones.

        Raises
        ------
        ValueError
            If an option is unknown or wrong.
        """
        if pruner["name"] != NAME:
            return None
        return made_of(cls, "pruner", pruner, "{name: asha, min_resource: 3, reduction_factor: 3}")

    def after(self, epoch: int) -> int:
        """Return the first rung after an epoch.

        >>> [Halving().after(epoch) for epoch in (0, 2, 3, 8, 9)]
        [3, 3, 9, 9, 27]
        """
        rung = self.min_resource
        while rung <= epoch:
            rung *= self.reduction_factor
        return rung

    def ranked(
        self, costs: Mapping[int, Mapping[int, float]], chosen: Collection[int] | None = ()
    ) -> list[tuple[int, bool]]:
        """Return trials in the order in which they continue, and whether they are to continue.

        Those of the highest rung are first, and of a rung the best. Trials that have not reached
        the first rung are left out.

        Parameters
        ----------
        costs : mapping of int to mapping of int to float
            Of each trial those of its epochs, the lowest is best. A trial is in all rungs that it
            has reached, and continues from the highest.
        chosen : collection of int, optional
            Trials that continue already from their highest rung, or are complete. None: without
            regard to how many have continued.

        Examples
        --------
        >>> Halving(1, 2).ranked({0: {1: 0.3, 2: 0.2}, 1: {1: 0.2}, 2: {1: 0.4}, 3: {1: 0.1}})
        [(0, False), (3, True), (1, False), (2, False)]
        """
        found: dict[int, bool] = {}
        rungs, rung = [], self.min_resource
        while there := _costs_at(rung, costs):
            rungs.append(there)
            rung *= self.reduction_factor
        for there in reversed(rungs):
            order = sorted(there, key=lambda one: (there[one], one))
            free = most = len(order) // self.reduction_factor
            if chosen is not None:
                free -= sum(one in found or one in chosen for one in order)
            for place, one in enumerate(order):
                if one not in found:
                    found[one] = place < most and free > 0 and one not in (chosen or ())
                    free -= found[one]
        return [*found.items()]


def _costs_at(rung: int, costs: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return the cost of each trial that has reached a rung, at the first epoch from there on."""
    found = {}
    for one, own in costs.items():
        if there := [epoch for epoch in own if epoch >= rung]:
            cost = own[min(there)]
            found[one] = math.inf if math.isnan(cost) else cost
    return found
