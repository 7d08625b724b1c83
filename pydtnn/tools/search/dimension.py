"""An option that trials of a search set to different values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydtnn.utils import plain_yaml

if TYPE_CHECKING:
    import optuna

WHO = "search"

MAX_GRID = 100_000
"""Largest number of trials of a grid."""

Value = bool | int | float | str | None


@dataclass(frozen=True)
class Dimension:
    """An option that trials set to different values.

    Attributes
    ----------
    name : str
        As on the command line of `pydtnn.train`, such as "lr" or "model_options.shortcut".
    choices : tuple
        Its values; empty for a range.
    low, high : int or float
        First and last value of a range.
    log : bool
        Whether values of the range are equally likely by logarithm.
    step : int or float or None
        Difference of neighbours in the range.
    condition : dict of str to tuple
        Dimensions before this one, and the values with which this one is part of a trial.
    """

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False
    step: float | None = None
    condition: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether a range contains integers only."""
        return all(isinstance(one, int) for one in (self.low, self.high, self.step or 0))

    @property
    def names(self) -> dict[Any, Any]:
        """Its choices by what samplers store."""
        return {stored(choice): choice for choice in self.choices}

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values that are checked before the first trial."""
        return self.choices or (self.low, self.high)

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Return whether a trial with these values of the dimensions before has this one."""
        return all(
            name in values and values[name] in allowed for name, allowed in self.condition.items()
        )

    def suggest(self, trial: optuna.trial.BaseTrial) -> Any:
        """Return the value of a trial, which its sampler chooses."""
        if self.choices:
            return self.names[trial.suggest_categorical(self.name, [*self.names])]
        if self.is_whole:
            step = int(self.step or 1)
            return trial.suggest_int(
                self.name, int(self.low), int(self.high), log=self.log, step=step
            )
        return trial.suggest_float(self.name, self.low, self.high, log=self.log, step=self.step)

    def values(self) -> list[Any]:
        """Return all values, for a grid.

        Raises
        ------
        ValueError
            If the range is continuous.
        """
        if self.choices:
            return [*self.choices]
        step = self.step or (1 if self.is_whole and not self.log else None)
        if step is None:
            raise ValueError(
                f"{WHO}: a grid requires values or a step of {self.name}; add step, or write a list"
            )
        count = math.floor((self.high - self.low) / step * (1 + 1e-12)) + 1
        if count > MAX_GRID:
            raise ValueError(f"{WHO}: {self.name} has {count:,} values; use a larger step")
        return [self.low + number * step for number in range(count)]


def stored(choice: Any) -> Value:
    """Return a choice as samplers store it: lists and mappings as text."""
    return choice if isinstance(choice, Value) else plain_yaml.dump(choice)


def named(dimensions: Sequence[Dimension], values: Mapping[str, Value]) -> dict[str, Any]:
    """Return the values that a sampler stores."""
    names = {one.name: one.names for one in dimensions if one.choices}
    return {n: names[n][value] if n in names else value for n, value in values.items()}
