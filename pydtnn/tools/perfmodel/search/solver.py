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


class Solution(NamedTuple):
    """Options of the first units, without their states.

    Attributes
    ----------
    seconds : float
        Sum of the times, in s.
    memory : float
        Sum of the memory, in B.
    name : str
        That of the last unit's option.
    before : Solution or None
        The options of the units before it; None if there is no unit.
    """

    seconds: float = 0.0
    memory: float = 0.0
    name: str = ""
    before: Solution | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The options' names, in the order of units."""
        found, at = list[str](), self
        while at.before is not None:
            found.append(at.name)
            at = at.before
        return tuple(reversed(found))


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
    fronts: dict[Frontier, list[Solution]] = {(): [Solution()]}
    for index, unit in enumerate(units):
        found: dict[Frontier, list[Solution]] = {}
        for frontier, partial in fronts.items():
            states = dict(frontier)
            for option in options(index, tuple(states[source] for source in unit.inputs)):
                after = states | dict(zip(unit.inputs, option.inputs, strict=True))
                after[index] = option.output
                key = tuple((i, s) for i, s in sorted(after.items()) if last.get(i, -1) > index)
                into = found.setdefault(key, [])
                for one in partial:
                    memory = one.memory + option.memory
                    if memory <= memory_limit:
                        seconds = one.seconds + option.seconds
                        into.append(Solution(seconds, memory, option.name, one))
        kept = most if memory_limit < inf else 1
        fronts = {key: _best(own, kept) for key, own in found.items() if own}
    return _best([one for own in fronts.values() for one in own], most)


def _best(found: list[Solution], most: int) -> list[Solution]:
    """Return the choices that no other one beats, in the order of time; at most `most` of them."""
    kept: list[Solution] = []
    for one in sorted(found, key=lambda own: own[:2]):
        if not kept or one.memory < kept[-1].memory:
            kept.append(one)
    if len(kept) <= most or most == 1:
        return kept[:most]
    step = (len(kept) - 1) / (most - 1)
    return [kept[round(i * step)] for i in range(most)]
