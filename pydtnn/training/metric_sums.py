"""Sums over samples, which ranks can add; means are computed only at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.training.logs import Logs


class Totals:
    """Sums of several quantities over the same samples, and the number of samples.

    Means of means are wrong if batches or ranks have different numbers of samples; sums and counts
    are exact.

    Parameters
    ----------
    names : iterable of str
        Names of the quantities, such as "loss", "accuracy".
    xp : module
        Array module of the sums; `means` and `count` require sums on the host.
    results : mapping of str to callable, optional
        For some of the quantities, a function of the sum and the number of samples that returns
        what is logged, see `Metric.result`.
    sizes : mapping of str to int, optional
        For some of the quantities, their number of sums if it is not 1; `results` receives an
        array.

    Attributes
    ----------
    names : tuple of str
    values : Array of float64
        The sums in the order of `names`, then the count. An allreduce of this array sums over all
        ranks.

    Examples
    --------
    >>> totals = Totals(["loss"])
    >>> totals.add(3, 6.0)
    >>> totals.add(1, 4.0)
    >>> totals.means()
    {'loss': 2.5}
    """

    def __init__(
        self,
        names: Iterable[str],
        xp: Any = np,
        results: Mapping[str, Callable[[Any, int], Any]] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.names, self._results, self._sizes = tuple(names), results or {}, sizes or {}
        lengths = (*(self._sizes.get(name, 1) for name in self.names), 1)
        ends = [*accumulate(lengths, initial=0)]
        self._parts = [slice(first, last) for first, last in pairwise(ends)]
        self.values: Array = xp.zeros(ends[-1], "float64")

    @property
    def count(self) -> int:
        """Number of samples."""
        return int(self.values[-1])

    def add(self, count: int, *sums: Number) -> None:
        """Add the sums over `count` samples, in the order of `names`."""
        if len(sums) != len(self.names):
            raise ValueError(f"Totals: expected sums of {self.names}, got {len(sums)} numbers")
        for place, value in zip(self._parts, (*sums, count), strict=True):
            part = self.values[place]  # also on a device, without synchronisation
            part += value

    def load(self, values: Array) -> None:
        """Load the `values` of a `Totals` with the same names.

        Raises
        ------
        ValueError
            If they have another shape; nothing is changed.
        """
        if np.shape(values) != self.values.shape:
            raise ValueError(
                f"Totals: the saved sums must have shape {self.values.shape}, got "
                f"{np.shape(values)}; use those of {', '.join(self.names)}"
            )
        self.values[:] = values

    def __iadd__(self, other: Totals) -> Totals:
        """Add the sums and the count of other samples."""
        if other.names != self.names:
            raise ValueError(f"Totals: expected sums of {self.names}, got {other.names}")
        self.values += other.values
        return self

    def __add__(self, other: Totals) -> Totals:
        """Return the sums over the samples of both, on the host."""
        total = Totals(self.names, results=self._results, sizes=self._sizes)
        total += self
        total += other
        return total

    def means(self) -> Logs:
        """Return the means, or `results`; NaN if there is no sample."""
        if not self.count:
            return Logs(dict.fromkeys(self.names, float("nan")))
        logs, count = Logs(), self.count
        for name, place in zip(self.names, self._parts, strict=False):
            part = self.values[place]
            total = part.copy() if self._sizes.get(name, 1) > 1 else float(part[0])
            logs[name] = (
                self._results[name](total, count) if name in self._results else total / count
            )
        return logs

    def not_finite(self) -> list[str]:
        """Return the names of the quantities with a sum that is not finite."""
        parts = zip(self.names, self._parts, strict=False)
        return [name for name, place in parts if not np.isfinite(self.values[place]).all()]
