"""The arrays that ranks must have in common between steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.collectives import PIPELINE
from pydtnn.layers.part import Part
from pydtnn.layers.statistics import RUNNING
from pydtnn.training.setup import Setup

Axes = tuple[str, ...]


class Watched(NamedTuple):
    """An array that ranks must have in common.

    Attributes
    ----------
    name : str
        Kind and name: "parameter conv0.w", "velocity of conv0.w", "running_mean of norm0".
    array : Array
        This rank's values, contiguous.
    cut : tuple of str
        Axes of the mesh along which ranks have other values; ranks that differ only in their
        position along the others have the same.
    """

    name: str
    array: Array
    cut: Axes


def watched_arrays(setup: Setup, numbers: np.ndarray) -> list[Watched]:
    """Return the arrays that this rank must have in common with others, in the network's order.

    Collective: all ranks call it. The state of an optimizer of which ranks store different ranges
    is not among them.

    Parameters
    ----------
    setup : Setup
    numbers : ndarray
        Number of updates and learning rate, filled by the caller.
    """
    stages = () if setup.mesh is None or PIPELINE not in setup.mesh.shape else (PIPELINE,)
    parts = {name: p.part for name, p in setup.model.parameters.items()}

    def cut(part: Part | None, *others: str) -> Axes:
        return (*stages, *(() if part is None else part.axes), *others)

    result = [Watched("number of updates or learning rate", numbers, ())]
    for p in reversed(setup.model.parameters.values()):  # forward's order
        result.append(Watched(f"parameter {p.name}", p.master, cut(p.part)))
    for slot, name, array in _slots(setup):
        result.append(Watched(f"{slot} of {name}", array, cut(parts[name])))
    for s in setup.model.statistics.statistics:
        own = () if setup.equal_statistics or s.frozen else ("data",)
        for what, array in zip(RUNNING, (s.mean, s.variance), strict=True):
            result.append(Watched(f"{what} of {s.name}", array, cut(s.part, *own)))
    return result


def _slots(setup: Setup) -> list[tuple[str, str, Array]]:
    """Return slot, parameter and values of the optimizer's state; nothing if it is distributed."""
    stored = [*setup.optimizer.stored()]
    complete = all(own == slice(0, len(bucket.values)) for _, bucket, own, _ in stored)
    if not all(setup.comm.gather_object(complete)):
        return []

    def entries() -> Iterator[tuple[str, str, Array]]:
        for slot, bucket, _, values in stored:
            for entry in bucket.parameters:
                yield slot, entry.name, values[entry.slice]

    order = {name: -place for place, name in enumerate(setup.model.parameters)}
    return sorted(entries(), key=lambda found: order[found[1]])


def places_of(setup: Setup) -> list[dict[str, int]]:
    """Return the positions of all ranks along the axes of the mesh. Collective."""
    own = {"data": setup.comm.rank} if setup.mesh is None else setup.mesh.position
    return setup.comm.gather_object(own)
