"""Tables of ranked strategies and of the limits of each kind, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

from pydtnn.kernels import Backend
from pydtnn.layers.attention import DotProductAttention
from pydtnn.layers.base import Layer
from pydtnn.layers.collectives import PIPELINE
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.experts import Experts
from pydtnn.layers.linear import Linear
from pydtnn.layers.pool import AvgPool2d, MaxPool2d
from pydtnn.tools.perfmodel.oracle.ranking import KINDS, MAX_STAGES, Entry, best
from pydtnn.tools.perfmodel.oracle.what_if import Sweep
from pydtnn.tools.perfmodel.prediction import Prediction
from pydtnn.tools.perfmodel.workload_rank import layers_of
from pydtnn.training.workload import Workload
from pydtnn.utils.files import write_file
from pydtnn.utils.tables import csv_of
from pydtnn.utils.units import align, memory


@dataclass(frozen=True)
class Limit:
    """The number of ranks up to which a strategy divides the work of all layers.

    Attributes
    ----------
    kind : str
    ranks : int
    reason : str
        What limits it. Layers that cannot be divided among more ranks are computed by all of them.
    """

    kind: str
    ranks: int
    reason: str


def find_limits(work: Workload, backend: Backend, stages: int = MAX_STAGES) -> list[Limit]:
    """Return the limit of each strategy for a network.

    References
    ----------
    Kahira et al., "An oracle for guiding large-scale model/hybrid parallel training of
    convolutional neural networks", HPDC 2021, table 3, last column.
    """
    layers = layers_of(work, backend)
    why = f"{len(layers)} layers"
    if len(layers) > stages:
        why += f"; longer pipelines than {stages} mostly wait, and are not tried"
    limits = [
        Limit("data", work.batch, f"{work.batch} samples in a step"),
        *_limits(layers),
        Limit(PIPELINE, min(len(layers), stages), why),
    ]
    of_kinds = ([one for one in limits if one.kind == kind] for kind in KINDS)
    return [min(own, key=lambda one: one.ranks) for own in of_kinds if own]


def _limits(layers: list[Layer]) -> Iterator[Limit]:
    """Yield the limits of each layer."""
    first = True
    for layer in layers:
        name, channels = layer.name, layer.input_shapes[0][-1]
        if isinstance(layer, Conv2d | MaxPool2d | AvgPool2d):
            rows = layer.output_shape[0]
            extent = layer.kernel[0] // 2  # a stripe is not thinner than its halo
            most = min(rows, layer.input_shapes[0][0] // max(extent * layer.stride[0], 1))
            yield Limit("spatial", max(most, 1), f"{name} has {rows} rows")
        if isinstance(layer, DotProductAttention):
            for kind in ("filter", "tensor"):
                yield Limit(kind, layer.heads, f"{name} has {layer.heads} heads")
            positions = min(shape[0] for shape in layer.input_shapes[: layer.sequences])
            yield Limit("context", positions, f"{name} has {positions} positions")
        if isinstance(layer, Experts):
            yield Limit("expert", layer.experts, f"{name} has {layer.experts} experts")
        if isinstance(layer, Conv2d):
            yield Limit("filter", layer.filters, f"{name} has {layer.filters} filters")
        if isinstance(layer, Linear):
            yield Limit("filter", layer.features, f"{name} has {layer.features} features")
        if isinstance(layer, Conv2d | Linear):
            most = max(channels, layer.output_shape[-1])  # one of both is divided
            yield Limit("tensor", most, f"{name} has {most} channels")
            if not first:  # the channels of an image are not divided
                yield Limit("channel", channels, f"{name} has {channels} input channels")
            first = False


OMITTED = ("loader", "update", "epoch", "node h", "compute")
"""Columns that narrow terminals do not show, in this order."""


UNITS = ((1e-3, 1e6, "us"), (1, 1e3, "ms"), (600, 1, "s"), (7.2e6, 1 / 3600, "h"))
"""Limits of times in s, and the units of those below; longer ones are in days."""


def durations(times: Sequence[float]) -> list[str]:
    """Format the times of a column, in s, with three digits and the unit of the shortest.

    >>> durations([75.0, 8000.0]), durations([0.0123])
    (['75 s', '8,000 s'], ['12.3 ms'])
    """
    least = min(times, default=0.0)
    scale, unit = next(((s, unit) for most, s, unit in UNITS if least < most), (1 / 86400, "d"))
    values = [scale * seconds for seconds in times]
    return [f"{own:.3g} {unit}" if own < 1000 else f"{own:,.0f} {unit}" for own in values]


def write(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as comma-separated values, if there is a file for them."""
    if path:
        write_file("oracle", path, csv_of(rows).encode())


def format_times(rows: Iterable[list[Any]], column: int) -> None:
    """Replace the times of a column, in s, by text with the unit of the shortest."""
    found = [row for row in rows if isinstance(row[column], float)]
    for row, text in zip(found, durations([row[column] for row in found]), strict=True):
        row[column] = text


def duration(seconds: float) -> str:
    """Format a time with three digits."""
    return durations([seconds])[0]


def percent(part: float, whole: float) -> str:
    """Format a share."""
    return f"{100 * part / whole:.0f} %"


def title(work: Workload, platform: str, per_rank: int | None) -> str:
    """Return the first line of a report."""
    shape = "x".join(map(str, work.input_shape))
    batch = f"{per_rank} samples per rank" if per_rank else f"global batch {work.batch}"
    return f"{work.network}, {shape}, {batch}, {work.samples:,} samples per epoch, on {platform}"


COLUMNS: Mapping[str, Callable[[Entry, Prediction], Any]] = {
    "strategy": lambda entry, one: entry.work.strategy,
    "ranks": lambda entry, one: str(entry.work.ranks),
    "step": lambda entry, one: one.seconds,
    "epoch": lambda entry, one: one.epoch,
    "compute": lambda entry, one: percent(one.step.compute - one.step.update, one.seconds),
    "exposed": lambda entry, one: percent(one.step.exposed + one.step.idle, one.seconds),
    "loader": lambda entry, one: percent(one.loader, one.seconds),
    "update": lambda entry, one: percent(one.step.update, one.seconds),
    "memory": lambda entry, one: memory(one.memory.total),
    "efficiency": lambda entry, one: percent(entry.efficiency, 1.0),
    "node h": lambda entry, one: f"{entry.node_hours:.3g}",
    "bottleneck": lambda entry, one: entry.bottleneck if entry.possible else "memory",
}
"""Cells of an entry and its projection by the name of their column; times are in s."""


def ranking(entries: Iterable[Entry], width: int) -> list[str]:
    """Return a table of entries with a projection, one line each, at most as wide as `width`."""
    known = [(entry, one) for entry in entries if (one := entry.projection)]
    rows = [[*COLUMNS], *([cell(*one) for cell in COLUMNS.values()] for one in known)]
    for name in ("step", "epoch"):
        format_times(rows, rows[0].index(name))
    lines = align(rows, 1)
    for name in OMITTED:
        if max(map(len, lines)) > width:
            place = rows[0].index(name)
            rows = [row[:place] + row[place + 1 :] for row in rows]
            lines = align(rows, 1)
    return [line[:width] for line in lines]


def of_best(found: Mapping[int, Sequence[Entry]], width: int) -> list[str]:
    """Return a table of the best strategy for each number of ranks, and the fastest of them."""
    chosen = [one for entries in found.values() if (one := best(entries)) is not None]
    lines = ranking(chosen, width)
    for ranks, entries in found.items():
        if best(entries) is None:
            why = entries[0].reason if entries else "no strategy is possible"
            lines.append(f"{ranks} ranks: {why}"[: max(width, 80)])
    if chosen:
        fastest = min(chosen, key=lambda one: one.projection.epoch if one.projection else 0).work
        lines += ["", f"fastest: {fastest.strategy}, {fastest.ranks} ranks"]
    return lines


def of_limits(limits: Iterable[Limit]) -> list[str]:
    """Return the limits, one line each."""
    rows = [[limit.kind, f"{limit.ranks} ranks", limit.reason] for limit in limits]
    return ["  " + line for line in align(rows, 3)]


QUANTITIES = ("time of an epoch", "speed-up")
"""What a sweep can show: the time in s, or the throughput relative to one rank."""


def value_of(entry: Entry, what: str, ratio: float = 1.0) -> float:
    """Return one of `QUANTITIES`; nan without a projection.

    Parameters
    ----------
    entry : Entry
    what : str
    ratio : float
        By which a step takes longer than predicted.
    """
    if entry.projection is None:
        return nan
    speed = entry.efficiency * entry.work.ranks
    return speed / ratio if what == QUANTITIES[1] else entry.projection.epoch * ratio


def of_sweep(
    found: Sweep,
    what: str = QUANTITIES[0],
    notes: Callable[[Entry], Mapping[str, str]] = lambda entry: {},
) -> list[str]:
    """Return a table of a sweep: lines for each strategy, and the first reason against it.

    Parameters
    ----------
    found : Sweep
    what : str
        One of `QUANTITIES`.
    notes : callable
        Returns further cells of an entry, by the name of their line.
    """

    def cell(value: float) -> Any:
        return "-" if isnan(value) else f"{value:.2f}" if what == QUANTITIES[1] else value

    lines: list[list[Any]] = [[f"{what} by {found.axis}", *found.texts]]
    refused = []
    for name, entries in found.entries.items():
        lines.append([name, *(cell(value_of(one, what)) for one in entries)])
        times = [value_of(one, what, one.virtual) for one in entries]
        if not all(map(isnan, times)):
            lines.append(["  on virtual ranks", *map(cell, times)])
        cells = [notes(one) for one in entries]
        for line in dict.fromkeys(line for one in cells for line in one):
            lines.append([line, *(one.get(line, "-") for one in cells)])
        why = ((t, e.reason) for t, e in zip(found.texts, entries, strict=True) if e.reason)
        refused += [f"{name}, {found.axis} {text}: {reason}" for text, reason in [*why][:1]]
    for column in range(1, len(lines[0])):
        format_times(lines, column)
    return align(lines, 1) + refused


def of_winners(found: Sweep) -> list[str]:
    """Return the fastest strategy for each value of a sweep, one line each."""
    lines = ["fastest that is possible:"]
    for i, text in enumerate(found.texts):
        times_of = {
            name: projection.epoch
            for name, entries in found.entries.items()
            if entries[i].possible and (projection := entries[i].projection)
        }
        winner = min(times_of, key=lambda name: times_of[name]) if times_of else "none"
        lines.append(f"  {text}: {winner}")
    return lines


# -- the terms of one prediction ------------------------------------------------------------------


def explain(projection: Prediction) -> list[str]:
    """Return the terms of a prediction: of the step, of memory, and of each layer."""
    step, one = projection.step, projection
    terms = [
        ("forward", step.forward),
        ("backward", step.backward),
        ("recomputed", step.recomputed),
        ("Python outside of layers", step.other),
        ("exchanges of layers, exposed", step.layers_exposed),
        ("sums of gradients, exposed", step.gradients_exposed),
        ("waits for other stages", step.idle),
        ("update", step.update),
        ("loader, exposed", one.loader),
        ("step", one.seconds),
    ]
    rows = [[name, duration(value), percent(value, one.seconds)] for name, value in terms if value]
    lines = [
        f"{one.work.strategy}: {one.work.samples_per_rank} samples per rank",
        *align(rows, 1),
        "",
        f"epoch: {one.work.steps} steps of {duration(one.seconds)}, checkpoint "
        f"{duration(one.checkpoint)}: {duration(one.epoch)}",
        f"links are busy for {duration(step.busy)} of a step",
        "",
    ]
    parts = asdict(one.memory) | {"memory of a rank": one.memory.total}
    lines += [*align([[name, memory(value)] for name, value in parts.items()], 1), ""]
    rows = [["layer", "forward", "backward", "recomputed", "exchange", "share"]]
    for layer in step.layers:
        times = (layer.forward, layer.backward, layer.recomputed, layer.exchange)
        share = f"{100 * layer.seconds / one.seconds:.1f} %"
        rows.append([layer.name, *map(duration, times), share])
    return lines + align(rows, 1)
