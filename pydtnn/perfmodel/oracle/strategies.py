"""Enumeration of strategies for a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pydtnn.layers.collectives import PIPELINE
from pydtnn.perfmodel.strategy import Strategy
from pydtnn.utils.suggest import unknown

AXES = ("spatial", "filter", "channel", PIPELINE)
"""Axes that are combined with "data"."""

KINDS = ("data", *AXES)

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

    def of(self, strategy: Strategy) -> Iterator[Strategy]:
        """Yield a strategy and its variants."""
        yield strategy
        if self.recompute:
            yield replace(strategy, recompute="auto")
        if strategy.data > 1:
            if self.sharded:
                yield replace(strategy, scheme="sharded")
            for name in self.compress:
                yield replace(strategy, compress=name)


def strategies(
    ranks: int, kinds: Sequence[str] = KINDS, variants: Variants | None = None
) -> Iterator[Strategy]:
    """Yield all strategies for a number of ranks: "data", one other axis, and both of them.

    Parameters
    ----------
    ranks : int
    kinds : sequence of str
        Of `KINDS`; hybrids of "data" with another axis are included if both are.
    variants : Variants, optional

    Raises
    ------
    ValueError
        If a kind is unknown.

    Examples
    --------
    >>> [s.name for s in strategies(4, ("data", "filter"), Variants(False, False))]
    ['data 4', 'data 2 x filter 2', 'filter 4']
    """
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"oracle: {unknown('strategy', kind, KINDS)}")
    variants = variants or Variants()
    if ranks == 1:
        yield from variants.of(Strategy())
        return
    if "data" in kinds:
        yield from variants.of(Strategy({"data": ranks}))
    for axis in kinds:
        for part in range(2, ranks + 1) if axis in AXES else ():
            hybrid = part < ranks
            if ranks % part or (hybrid and "data" not in kinds):
                continue
            if part > (MOST_STAGES if axis == PIPELINE else MOST_PARTS):
                continue
            axes = {"data": ranks // part, axis: part}
            yield from variants.of(Strategy(axes))
