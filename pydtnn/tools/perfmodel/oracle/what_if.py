"""What-if sweeps: the time of an epoch when one property of the platform or run varies.

References
----------
Castelló, Catalán, Dolz, Mestre, Quintana-Ortí, Duato, Performance modeling for distributed training
of convolutional neural networks, PDP 2021: the axes are batch size, node FLOP rate, node memory
bandwidth, link bandwidth and number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydtnn.tools.perfmodel.entries import check
from pydtnn.tools.perfmodel.oracle.ranking import Entry, Oracle, first_of_kinds
from pydtnn.tools.perfmodel.platform import Link, Platform, RankClass
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.training.workload import Workload
from pydtnn.utils.units import format_quantity

SWEEPS = {
    "batch": "global batch",
    "flops": "rate of a rank (flop/s)",
    "memory": "memory bandwidth of a rank (B/s)",
    "bandwidth": "bandwidth between hosts (B/s)",
    "latency": "latency between hosts (s)",
    "ranks": "ranks",
}
"""Properties that `--sweep` varies, in words."""

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Multiples of the platform's figure, and of the batch, that are tried."""


@dataclass(frozen=True)
class Point:
    """A value of the axis of a sweep.

    Attributes
    ----------
    value : float
        Samples, flop/s, B/s or ranks.
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
        By the strategy's name, without numbers of ranks if these vary.
    """

    axis: str
    points: tuple[Point, ...]
    entries: Mapping[str, tuple[Entry, ...]]


def sweep(
    axis: str,
    projector: Projector,
    strategies: Callable[[int], Sequence[Workload]],
    ranks: Sequence[int],
) -> Sweep:
    """Predict strategies while one property varies and all others stay.

    Parameters
    ----------
    axis : str
        One of `SWEEPS`.
    projector : Projector
    strategies : callable
        Returns the strategies for a number of ranks.
    ranks : sequence of int
        Numbers of ranks; those of the largest are predicted, unless the ranks vary.

    Raises
    ------
    ValueError
        If the axis is unknown.
    """
    check("--sweep", "axis", axis, SWEEPS)
    if axis == "ranks":
        return _over_ranks(projector, strategies, ranks)
    chosen = strategies(max(ranks))
    points, columns = [], []
    for factor in FACTORS:
        if axis == "batch":
            batch = max(round(factor * projector.work.batch), 1)
            point, oracle = Point(batch, str(batch)), Oracle(projector)
            works = [replace(work, batch=batch) for work in chosen]
        else:
            platform, point = change(axis, factor, projector.platform)
            oracle = Oracle(projector.on(platform))
            works = [*chosen]
        points.append(point)
        columns.append([oracle.entry(work) for work in works])
    rows = zip(chosen, zip(*columns, strict=True), strict=True)
    return Sweep(axis, tuple(points), {work.strategy: entries for work, entries in rows})


def _over_ranks(
    projector: Projector, strategies: Callable[[int], Sequence[Workload]], ranks: Sequence[int]
) -> Sweep:
    """Return the fastest entry of each kind for each number of ranks."""
    oracle = Oracle(projector)
    columns = [first_of_kinds(oracle.rank(strategies(number))) for number in ranks]
    kinds = dict.fromkeys(kind for column in columns for kind in column if kind != "serial")
    points = tuple(Point(number, str(number)) for number in ranks)

    def entry_of(kind: str, number: int, column: Mapping[str, Entry]) -> Entry:
        work = replace(projector.work, axes={"data": number})
        missing = Entry(work, None, f"{kind} is not possible")
        return column.get(kind, column.get("serial", missing))

    pairs = [*zip(ranks, columns, strict=True)]
    entries = {kind: tuple(entry_of(kind, *pair) for pair in pairs) for kind in kinds or ["serial"]}
    return Sweep("ranks", points, entries)


def change(axis: str, factor: float, platform: Platform) -> tuple[Platform, Point]:
    """Return a platform of which one property is multiplied, and its value."""
    compute, messages = platform.compute, platform.messages
    if axis == "flops":
        peak = {dtype: factor * rate for dtype, rate in compute.peak.items()}
        rates = {name: factor * rate for name, rate in compute.rates.items()}
        value = next(iter(peak.values()))
        changed = replace(platform, compute=replace(compute, peak=peak, rates=rates))
        return changed, Point(value, f"{value / 1e9:.4g} Gflop/s")
    if axis == "memory":
        value = factor * compute.memory_bandwidth
        more = replace(
            compute,
            memory_bandwidth=value,
            host_bandwidth=compute.host_bandwidth and factor * compute.host_bandwidth,
            bandwidths={name: factor * rate for name, rate in compute.bandwidths.items()},
        )
        return replace(platform, compute=more), Point(value, f"{value / 1e9:.4g} GB/s")
    latency, bandwidth = (factor, 1.0) if axis == "latency" else (1.0, factor)
    link = _faster(messages.between, latency, bandwidth)
    link = replace(link, shared=link.shared and bandwidth * link.shared)
    classes = tuple(_faster(one, latency, bandwidth) for one in messages.classes)
    changed = replace(platform, messages=replace(messages, between=link, classes=classes))
    if axis == "latency":
        return changed, Point(link.latency, format_quantity(link.latency, "s"))
    return changed, Point(link.bandwidth, f"{8 * link.bandwidth / 1e9:.4g} Gbit/s")


Channel = TypeVar("Channel", Link, RankClass)


def _faster(link: Channel, latency: float, bandwidth: float) -> Channel:
    return replace(link, latency=latency * link.latency, bandwidth=bandwidth * link.bandwidth)
