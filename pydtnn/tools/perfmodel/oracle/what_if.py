"""What-if sweeps: the time of an epoch when one property of the platform or run varies.

References
----------
Castelló, Catalán, Dolz, Mestre, Quintana-Ortí, Duato, Performance modeling for distributed training
of convolutional neural networks, PDP 2021: the axes are batch size, node FLOP rate, node memory
bandwidth, link bandwidth and number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    virtual : mapping of str to mapping of int to float
        The time of a step on virtual ranks relative to that of an entry, by name and point, of some
        of them.
    """

    axis: str
    values: tuple[float, ...]
    entries: Mapping[str, tuple[Entry, ...]]
    virtual: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        """The values with their unit."""
        return [*map(SWEEPS[self.axis].text, self.values)]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row of a table for each entry, in SI units."""
        for name, entries in self.entries.items():
            for i, (value, one) in enumerate(zip(self.values, entries, strict=True)):
                row = {"axis": self.axis, "value": value, **one.to_json()}
                if one.projection and (ratio := self.virtual.get(name, {}).get(i)):
                    row["virtual_seconds_per_step"] = ratio * one.projection.seconds
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
    columns = []
    for value in values:
        own, works, ranks = oracle, [*chosen], None
        if axis == "ranks":
            ranks = int(value)
        elif axis != "batch":
            changed = change(axis, value / usual, projector.platform)
            own = Oracle(projector.on(changed), per_rank)
        elif per_rank:
            own = Oracle(projector, int(value))
        else:
            works = [replace(work, batch=int(value)) for work in chosen]
        columns.append([_entry(own, work, ranks) for work in works])
    rows = zip(chosen, zip(*columns, strict=True), strict=True)
    names = {id(work): label(work) if axis == "ranks" else work.strategy for work in chosen}
    return Sweep(axis, tuple(values), {names[id(work)]: entries for work, entries in rows})


def _entry(oracle: Oracle, work: Workload, ranks: int | None) -> Entry:
    """Return the entry of a run on its ranks, or on others."""
    if ranks is not None:
        axis = first_axis(work)
        others = work.ranks // work.axes.get(axis, 1)
        if ranks % others:
            return Entry(work, None, f"expected a multiple of {others} ranks, got {ranks}")
        work = work.along({**work.axes, axis: ranks // others})
    return oracle.entry(work)


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
