"""Learning rate and weight decay of groups of parameters, selected by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pydtnn.layers.parameters import BucketEntry
from pydtnn.utils.names import matches, select, unknown
from pydtnn.utils.validate import check_float

Options = Mapping[str, Mapping[str, float | str]]
"""For each pattern of names, see `pydtnn.utils.names.select`, the options of its group."""

KEYS = ("lr_factor", "weight_decay")


class ParameterGroup(NamedTuple):
    """Options of a group of parameters.

    Attributes
    ----------
    lr_factor : float
        Factor on the optimizer's learning rate.
    weight_decay : float
        Replaces that of the optimizer, also for biases and the parameters of norms.
    rule : str
        One of the rules of an optimizer that has several; empty if it chooses.
    """

    lr_factor: float
    weight_decay: float
    rule: str = ""


class Groups:
    """The group of each parameter.

    Parameters
    ----------
    who : str
        First word of errors.
    options : mapping of str to mapping
        The first pattern that matches a parameter applies.
    rules : tuple of str
        Values of the option "rule"; there is none if it is empty.

    Raises
    ------
    TypeError, ValueError
        If an option is unknown or out of range.
    """

    def __init__(self, who: str, options: Options | None, rules: tuple[str, ...] = ()) -> None:
        self.who, self.rules = who, rules
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(
                f"{who}: groups must be a dict such as "
                f'{{"head": {{"lr_factor": 10}}}}, got {options!r}'
            )
        self.options = {
            pattern: self._check(pattern, own) for pattern, own in (options or {}).items()
        }

    def _check(self, pattern: str, own: object) -> dict[str, Any]:
        if not isinstance(own, Mapping):
            raise TypeError(
                f"{self.who}: the group {pattern!r} must be a dict such as "
                f'{{"lr_factor": 10}}, got {own!r}'
            )
        keys = (*KEYS, "rule") if self.rules else KEYS
        for key in own:
            if key not in keys:
                near = unknown(f"option of the group {pattern!r}", str(key), keys)
                rate = key in ("lr", "learning_rate")
                hint = "; lr_factor multiplies the learning rate" if rate else ""
                raise ValueError(f"{self.who}: {near}{hint}")
        if own.get("rule", "") not in ("", *self.rules):
            near = unknown(f"rule of the group {pattern!r}", str(own["rule"]), self.rules)
            raise ValueError(f"{self.who}: {near}")
        return {
            key: value
            if key == "rule"
            else check_float(self.who, f"{key} of the group {pattern!r}", value, at_least=0)
            for key, value in own.items()
        }

    def check(self, names: Iterable[str]) -> None:
        """Raise ValueError if a pattern matches none of a model's parameters.

        Raises
        ------
        ValueError
        """
        if self.options:
            select(f"{self.who}: groups", [*self.options], names)

    def of(self, name: str, weight_decay: float) -> ParameterGroup:
        """Return the group of a parameter; `weight_decay` is its default."""
        for pattern, own in self.options.items():
            if matches(pattern, name):
                return ParameterGroup(**{"lr_factor": 1.0, "weight_decay": weight_decay} | own)
        return ParameterGroup(1.0, weight_decay)

    def cut(
        self, entries: Sequence[BucketEntry], weight_decay: float, each: bool
    ) -> list[tuple[slice, ParameterGroup]]:
        """Find the ranges of a bucket that one call of an update rule may process.

        Parameters
        ----------
        entries : sequence of Entry
            The parameters of the bucket.
        weight_decay : float
            Default weight decay.
        each : bool
            Whether each parameter is a range; otherwise neighbours of one group are.

        Returns
        -------
        list of (slice, Group)
        """

        def group(entry: BucketEntry) -> ParameterGroup:
            return self.of(entry.name, weight_decay if entry.decay else 0.0)

        if each:
            return [(entry.slice, group(entry)) for entry in entries]
        runs = [(value, list(members)) for value, members in groupby(entries, group)]
        return [(slice(run[0].slice.start, run[-1].slice.stop), value) for value, run in runs]
