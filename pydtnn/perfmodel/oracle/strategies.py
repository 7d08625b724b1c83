"""Enumeration of strategies for a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from pydtnn.layers.collectives import PIPELINE
from pydtnn.perfmodel.workload import Workload
from pydtnn.utils.names import unknown

AXES = ("spatial", "filter", "channel", PIPELINE)
"""Axes that are combined with "data"."""

KINDS = ("data", *AXES)
"""Kinds of strategies: data parallelism, and that of each axis, alone or with data."""

MOST_PARTS = 128
"""Parts of a layer in an enumeration: the layers of few networks can be cut into more."""

MOST_STAGES = 8
"""Stages of a pipeline in an enumeration: longer ones wait more than they compute."""


@dataclass(frozen=True)
class Variants:
    """What is tried besides the axes.

    Parameters
    ----------
    recompute : bool
        Also with recomputation.
    sharded : bool
        Also with a sharded optimizer, where there are several ranks along "data".
    compress : sequence of str
        Also with these compressors of gradients.
    """

    recompute: bool = True
    sharded: bool = True
    compress: Sequence[str] = ()

    def of(self, work: Workload) -> Iterator[Workload]:
        """Yield a run and its variants."""
        yield work
        if self.recompute:
            yield replace(work, recompute="auto")
        if work.data > 1:
            if self.sharded:
                yield replace(work, scheme="sharded")
            for name in self.compress:
                yield replace(work, compress=name)


def strategies(
    work: Workload,
    ranks: int,
    kinds: Sequence[str] = KINDS,
    variants: Variants | None = None,
    *,
    most: int = 1,
) -> Iterator[Workload]:
    """Yield a run with all strategies for a number of ranks: "data", other axes, and hybrids.

    Parameters
    ----------
    work : Workload
    ranks : int
    kinds : sequence of str
        Of `KINDS`; hybrids of "data" with another axis are included if both are.
    variants : Variants, optional
    most : int
        Largest number of axes besides "data".

    Raises
    ------
    ValueError
        If a kind is unknown.

    Examples
    --------
    >>> found = strategies(Workload("mlp", (4,)), 4, ("data", "filter"), Variants(False, False))
    >>> [work.strategy for work in found]
    ['data 4', 'data 2 x filter 2', 'filter 4']
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"oracle: {unknown('strategy', kind, KINDS)}")
    variants = variants or Variants()
    if ranks == 1:
        yield from variants.of(replace(work, axes={}))
        return
    if "data" in kinds:
        yield from variants.of(replace(work, axes={"data": ranks}))
    others = [axis for axis in kinds if axis in AXES]
    for number in range(1, most + 1):
        for axes in combinations(others, number):
            for parts in _factorisations(ranks, axes):
                data = ranks // prod(parts)
                if data == 1 or "data" in kinds:
                    mesh = dict(zip(axes, parts, strict=True))
                    yield from variants.of(replace(work, axes={"data": data, **mesh}))


def _factorisations(ranks: int, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield the ranks along each axis, at least 2, whose product divides a number of ranks.

    >>> [*_factorisations(8, ("filter", "spatial"))]
    [(2, 2), (2, 4), (4, 2)]
    """
    if not axes:
        yield ()
        return
    largest = MOST_STAGES if axes[0] == PIPELINE else MOST_PARTS
    for part in range(2, min(ranks, largest) + 1):
        if ranks % part == 0:
            for rest in _factorisations(ranks // part, axes[1:]):
                yield part, *rest
