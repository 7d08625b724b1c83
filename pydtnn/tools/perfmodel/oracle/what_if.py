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
from typing import Any, NamedTuple, TypeVar

from pydtnn.tools.perfmodel.entries import check
from pydtnn.tools.perfmodel.oracle.ranking import Entry, Oracle
from pydtnn.tools.perfmodel.platform import Link, Platform, RankClass
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
class Point:
    """A value of the axis of a sweep.

    Attributes
    ----------
    value : float
        Samples, flop/s, B/s, s or ranks.
    text : str
    """

    value: float
    text: str


@dataclass(frozen=True)
class Sweep:
    """The entries of some strategies for each value.

    Attributes
    ----------
    axis : str
    points : tuple of Point
    entries : mapping of str to tuple of Entry
        By the strategy's name, for the axis "ranks" without the ranks of its first axis.
    virtual : mapping of str to mapping of int to float
        The time of a step on virtual ranks relative to that of an entry, by name and point, of some
        of them.
    """

    axis: str
    points: tuple[Point, ...]
    entries: Mapping[str, tuple[Entry, ...]]
    virtual: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row of a table for each entry, in SI units."""
        for name, entries in self.entries.items():
            for i, (point, one) in enumerate(zip(self.points, entries, strict=True)):
                row = {self.axis: point.value, **one.to_json()}
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
        usual = change(axis, 1.0, projector.platform)[1]
    values = values or [usual * factor for factor in FACTORS]
    if axis in ("batch", "ranks"):
        values = [max(round(value), 1) for value in values]
    points, columns = [], []
    for value in values:
        own, works, ranks = oracle, [*chosen], None
        if axis == "ranks":
            ranks = int(value)
        elif axis != "batch":
            platform, _ = change(axis, value / usual, projector.platform)
            own = Oracle(projector.on(platform), per_rank)
        elif per_rank:
            own = Oracle(projector, int(value))
        else:
            works = [replace(work, batch=int(value)) for work in chosen]
        points.append(Point(value, SWEEPS[axis].text(value)))
        columns.append([_entry(own, work, ranks) for work in works])
    rows = zip(chosen, zip(*columns, strict=True), strict=True)
    names = {id(work): label(work) if axis == "ranks" else work.strategy for work in chosen}
    return Sweep(axis, tuple(points), {names[id(work)]: entries for work, entries in rows})


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


def change(axis: str, factor: float, platform: Platform) -> tuple[Platform, float]:
    """Return a platform of which one property is multiplied, and its value."""
    compute, messages = platform.compute, platform.messages
    if axis == "flops":
        peak = {dtype: factor * rate for dtype, rate in compute.peak.items()}
        rates = {name: factor * rate for name, rate in compute.rates.items()}
        changed = replace(platform, compute=replace(compute, peak=peak, rates=rates))
        return changed, next(iter(peak.values()))
    if axis == "memory":
        value = factor * compute.memory_bandwidth
        more = replace(
            compute,
            memory_bandwidth=value,
            host_bandwidth=compute.host_bandwidth and factor * compute.host_bandwidth,
            bandwidths={name: factor * rate for name, rate in compute.bandwidths.items()},
        )
        return replace(platform, compute=more), value
    latency, bandwidth = (factor, 1.0) if axis == "latency" else (1.0, factor)
    link = _faster(messages.between, latency, bandwidth)
    link = replace(link, shared=link.shared and bandwidth * link.shared)
    classes = tuple(_faster(one, latency, bandwidth) for one in messages.classes)
    changed = replace(platform, messages=replace(messages, between=link, classes=classes))
    return changed, link.latency if axis == "latency" else link.bandwidth


Channel = TypeVar("Channel", Link, RankClass)


def _faster(link: Channel, latency: float, bandwidth: float) -> Channel:
    return replace(link, latency=latency * link.latency, bandwidth=bandwidth * link.bandwidth)
