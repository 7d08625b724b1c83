"""Choice of one option for each unit of a graph, by dynamic programming over its frontier.

Units are visited in order. The frontier are the results that later units read; two partial choices
with the same states of the frontier differ only in time and memory, so that of each frontier only
the choices remain that no other one beats in both. This is exact for every graph, and fast if few
results are live at a time, as in networks with branches and residuals.

References
----------
Bodlaender, "Treewidth: algorithmic techniques and results", 1997: dynamic programming over a path
decomposition, which the frontiers are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

State = Hashable
"""How a result is stored: its layout, and those in which it is available, too."""


class Unit(NamedTuple):
    """A unit of a graph.

    Attributes
    ----------
    name : str
    inputs : tuple of int
        Indices of earlier units whose results it reads.
    """

    name: str
    inputs: tuple[int, ...]


class UnitOption(NamedTuple):
    """A way to execute a unit.

    Attributes
    ----------
    name : str
    inputs : tuple of State
        States of the inputs afterwards: an exchange may have made further layouts available.
    output : State
        State of the result.
    seconds : float
        Time, exchanges included.
    memory : float
        Memory that remains in use until the end, in B.
    """

    name: str
    inputs: tuple[State, ...]
    output: State
    seconds: float
    memory: float = 0.0


Options = Callable[[int, tuple[State, ...]], Iterable[UnitOption]]
"""Returns the options of the unit of an index, given the states of its inputs."""


@dataclass(frozen=True)
class Solution:
    """Options of all units.

    Attributes
    ----------
    options : tuple of Option
    """

    options: tuple[UnitOption, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The options' names."""
        return tuple(option.name for option in self.options)

    @property
    def seconds(self) -> float:
        """Sum of the times, in s."""
        return sum(option.seconds for option in self.options)

    @property
    def memory(self) -> float:
        """Sum of the memory, in B."""
        return sum(option.memory for option in self.options)


class _Label(NamedTuple):
    """A partial choice, without its states."""

    seconds: float
    memory: float
    option: UnitOption | None
    before: _Label | None


Frontier = tuple[tuple[int, State], ...]


def solve(
    units: Sequence[Unit], options: Options, *, memory_limit: float = inf, most: int = 64
) -> list[Solution]:
    """Return the choices that no other one beats in both time and memory, the fastest first.

    Parameters
    ----------
    units : sequence of Unit
    options : callable
    memory_limit : float, optional
        Sum of the memory of all units that is possible, in B. Without a limit, only the fastest
        choice is returned.
    most : int, default 64
        Partial choices that are kept for the same states: the fastest, the one with the least
        memory, and others between them. With fewer than `most` the result is exact.

    Returns
    -------
    list of Solution
        Empty if nothing is possible within the limit.
    """
    last = {source: index for index, unit in enumerate(units) for source in unit.inputs}
    fronts: dict[Frontier, list[_Label]] = {(): [_Label(0.0, 0.0, None, None)]}
    for index, unit in enumerate(units):
        found: dict[Frontier, list[_Label]] = {}
        for frontier, labels in fronts.items():
            states = dict(frontier)
            for option in options(index, tuple(states[source] for source in unit.inputs)):
                after = states | dict(zip(unit.inputs, option.inputs, strict=True))
                after[index] = option.output
                key = tuple((i, s) for i, s in sorted(after.items()) if last.get(i, -1) > index)
                into = found.setdefault(key, [])
                for label in labels:
                    memory = label.memory + option.memory
                    if memory <= memory_limit:
                        into.append(_Label(label.seconds + option.seconds, memory, option, label))
        limited = memory_limit < inf
        fronts = {key: _best(labels, most if limited else 1) for key, labels in found.items()}
        fronts = {key: labels for key, labels in fronts.items() if labels}
    final = _best([label for labels in fronts.values() for label in labels], most)
    return [_trace(label) for label in final]


def _best(labels: list[_Label], most: int) -> list[_Label]:
    """Return the labels that no other one beats, in the order of time; at most `most` of them."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda own: (own.seconds, own.memory)):
        if not kept or label.memory < kept[-1].memory:
            kept.append(label)
    if len(kept) <= most:
        return kept
    if most == 1:
        return kept[:1]
    step = (len(kept) - 1) / (most - 1)
    return [kept[round(i * step)] for i in range(most)]


def _trace(label: _Label) -> Solution:
    """Return the options of a label, in the order of units."""
    found: list[UnitOption] = []
    at: _Label | None = label
    while at is not None and at.option is not None:
        found.append(at.option)
        at = at.before
    return Solution(tuple(reversed(found)))
