"""What-if sweeps: the time of an epoch when one property of the platform or run varies.

References
----------
Castelló, Catalán, Dolz, Mestre, Quintana-Ortí, Duato, Performance modeling for distributed training
of convolutional neural networks, PDP 2021: the axes are batch size, node FLOP rate, node memory
bandwidth, link bandwidth and number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import Any, NamedTuple

from pydtnn.tools.perfmodel.entries import check
from pydtnn.tools.perfmodel.oracle.ranking import Entry, Oracle
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.training.workload import Workload


class Property(NamedTuple):
    """What varies: its name, and the unit of its values with the SI value of that unit."""

    label: str
    unit: str = ""
    scale: float = 1.0

    def text(self, value: float) -> str:
        """Return a value with the unit."""
        return f"{value / self.scale:.6g} {self.unit}" if self.unit else str(value)


SWEEPS: Mapping[str, Property] = {
    "batch": Property("batch"),
    "flops": Property("rate of a rank", "Gflop/s", 1e9),
    "memory": Property("memory bandwidth of a rank", "GB/s", 1e9),
    "bandwidth": Property("bandwidth between hosts", "Gbit/s", 1e9 / 8),
    "latency": Property("latency between hosts", "us", 1e-6),
    "ranks": Property("ranks"),
}
"""Properties that `--sweep` varies. The batch is that of all ranks, or that of each if it is given.
More ranks are those along the first axis of a strategy; the others keep theirs."""

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Multiples of the platform's figure, of the batch and of the ranks, that are tried."""


@dataclass(frozen=True)
class Sweep:
    """The entries of some strategies for each value.

    Attributes
    ----------
    axis : str
    values : tuple of float
        Samples, flop/s, B/s, s or ranks.
    entries : mapping of str to tuple of Entry
        By the strategy's name, for the axis "ranks" without the ranks of its first axis.
    """

    axis: str
    values: tuple[float, ...]
    entries: Mapping[str, tuple[Entry, ...]]

    @property
    def texts(self) -> list[str]:
        """The values with their unit."""
        return [*map(SWEEPS[self.axis].text, self.values)]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row of a table for each entry, in SI units."""
        for entries in self.entries.values():
            for value, one in zip(self.values, entries, strict=True):
                row = {"axis": self.axis, "value": value, **one.to_json()}
                if one.projection and not isnan(one.virtual):
                    row["virtual_seconds_per_step"] = one.virtual * one.projection.seconds
                yield row


def sweep(
    axis: str, oracle: Oracle, chosen: Sequence[Workload], values: Sequence[float] = ()
) -> Sweep:
    """Predict strategies while one property varies and all others stay.

    Parameters
    ----------
    axis : str
        One of `SWEEPS`.
    oracle : Oracle
    chosen : sequence of Workload
        The strategies.
    values : sequence of float, optional
        Of the property; by default `FACTORS` times its value.

    Raises
    ------
    ValueError
        If the axis is unknown.
    """
    check("--sweep", "axis", axis, SWEEPS)
    projector, per_rank = oracle.projector, oracle.per_rank
    usual: float = per_rank or projector.work.batch
    if axis == "ranks":
        usual = max((work.ranks for work in chosen), default=1)
    elif axis != "batch":
        usual = value_of(axis, projector.platform)
    values = values or [usual * factor for factor in FACTORS]
    if axis in ("batch", "ranks"):
        values = [max(round(value), 1) for value in values]
    oracles = dict.fromkeys(values, oracle)
    if axis == "batch" and per_rank:
        oracles = {value: Oracle(projector, int(value)) for value in values}
    elif axis in SCALED:
        for value in values:
            changed = change(axis, value / usual, projector.platform)
            oracles[value] = Oracle(projector.on(changed), per_rank)

    def entry(work: Workload, value: float) -> Entry:
        if axis == "batch" and not per_rank:
            work = replace(work, batch=int(value))
        if axis == "ranks":
            first = first_axis(work)
            others = work.ranks // work.axes.get(first, 1)
            if value % others:
                why = f"expected a multiple of {others} ranks, got {value}"
                return Entry(work, None, why)
            work = work.along({**work.axes, first: int(value) // others})
        return oracles[value].entry(work)

    names = [label(work) if axis == "ranks" else work.strategy for work in chosen]
    entries = {
        name: tuple(entry(work, value) for value in values)
        for name, work in zip(names, chosen, strict=True)
    }
    return Sweep(axis, tuple(values), entries)


def first_axis(work: Workload) -> str:
    """Return the first axis with several ranks, "data" if there is none."""
    return next((axis for axis, ranks in work.axes.items() if ranks > 1), "data")


def label(work: Workload) -> str:
    """Return the name of a strategy without the ranks of its first axis.

    >>> label(Workload("mlp", (4,), axes={"data": 4, "filter": 2}))
    'data x filter 2'
    """
    axis = first_axis(work)
    return work.strategy.replace(f"{axis} {work.axes.get(axis, 1)}", axis, 1)


SCALED = {
    "flops": ("peak", "rates"),
    "memory": ("memory_bandwidth", "host_bandwidth", "bandwidths"),
    "bandwidth": ("bandwidth", "shared"),
    "latency": ("latency",),
}
"""Entries of a platform that are multiplied: of `Compute`, and of links between hosts."""


def value_of(axis: str, platform: Platform) -> float:
    """Return the value of a property of a platform; that of rates is the first peak."""
    compute = axis in ("flops", "memory")
    value = getattr(platform.compute if compute else platform.messages.between, SCALED[axis][0])
    return float(next(iter(value.values())) if isinstance(value, Mapping) else value)


def change(axis: str, factor: float, platform: Platform) -> Platform:
    """Return a platform of which one property is multiplied."""

    def times(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: factor * one for name, one in value.items()}
        return value and factor * value

    def scaled(part: Any) -> Any:
        names = [name for name in SCALED[axis] if hasattr(part, name)]
        return replace(part, **{name: times(getattr(part, name)) for name in names})

    if axis in ("flops", "memory"):
        return replace(platform, compute=scaled(platform.compute))
    messages = platform.messages
    between, classes = scaled(messages.between), tuple(map(scaled, messages.classes))
    return replace(platform, messages=replace(messages, between=between, classes=classes))
