"""What-if sweeps: the time of an epoch when one property of the platform or run varies.

References
----------
Castelló, Catalán, Dolz, Mestre, Quintana-Ortí, Duato, Performance modeling for distributed training
of convolutional neural networks, PDP 2021: the axes are batch size, node FLOP rate, node memory
bandwidth, link bandwidth and number of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydtnn.tools.perfmodel.entries import check
from pydtnn.tools.perfmodel.oracle.ranking import Entry, Oracle
from pydtnn.tools.perfmodel.platform import Link, Platform, RankClass
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.training.workload import Workload
from pydtnn.utils.units import format_quantity

SWEEPS = ("batch", "flops", "memory", "bandwidth", "latency")
"""Properties that `--sweep` varies: global batch, rate and bandwidth of memory of a rank, bandwidth
and latency between hosts."""

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Multiples of the platform's figure, and of the batch, that are tried."""


@dataclass(frozen=True)
class Point:
    """A value of the axis of a sweep.

    Attributes
    ----------
    value : float
        Samples, flop/s, B/s or s.
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
        By the strategy's name.
    """

    axis: str
    points: tuple[Point, ...]
    entries: Mapping[str, tuple[Entry, ...]]


def sweep(axis: str, projector: Projector, chosen: Sequence[Workload]) -> Sweep:
    """Predict strategies while one property varies and all others stay.

    Parameters
    ----------
    axis : str
        One of `SWEEPS`.
    projector : Projector
    chosen : sequence of Workload
        The strategies.

    Raises
    ------
    ValueError
        If the axis is unknown.
    """
    check("--sweep", "axis", axis, SWEEPS)
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
