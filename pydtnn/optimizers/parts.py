"""Norms of gradients that are partitioned over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pydtnn.kernels.reference.family import Number
from pydtnn.layers.parameters import Bucket

Axes = tuple[str, ...]


def _itself(value: Number, axes: Axes) -> Number:
    return value


@dataclass(frozen=True)
class Parts:
    """Sums of numbers over the axes of a mesh along which parameters are cut.

    Attributes
    ----------
    axes : tuple of str
        All axes besides "data".
    stages : tuple of str
        Those along which ranks have other parameters altogether.
    add : callable
        ``add(number, axes)`` returns the sum over axes. Collective.
    same : callable
        ``same(number, axes)`` returns the number of the first rank along axes. Collective.
    """

    axes: Axes = ()
    stages: Axes = ()
    add: Callable[[Number, Axes], Number] = _itself
    same: Callable[[Number, Axes], Number] = _itself

    def total(
        self,
        buckets: Collection[Bucket],
        square: Callable[[Bucket], Number],
        share: Callable[[Number], Number],
    ) -> Number:
        """Sum a number over all buckets of the network, those that all ranks have once.

        Parameters
        ----------
        buckets : collection of Bucket
            Those of this rank.
        square : callable
            Returns the number of this rank's range of a bucket.
        share : callable
            Sums a number over the ranks that update different ranges: `Share.total`.
        """
        sums: dict[Axes, Number] = {}
        for bucket in buckets:
            axes = cut_axes(bucket)
            sums[axes] = sums.get(axes, 0.0) + square(bucket)
        total = sum(self.add(sums[axes], axes) if axes else sums[axes] for axes in sorted(sums))
        total = self.add(share(total), self.stages)
        return self.same(total, tuple(axis for axis in self.axes if axis not in self.stages))


def cut_axes(bucket: Bucket) -> Axes:
    """Return the axes along which ranks have different parts of a bucket's parameters."""
    part = bucket.buffer.parameters[0].part
    return () if part is None else part.axes
