"""Sums over samples, kept so that ranks can add them up: means are taken at the end only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pydtnn.kernels.reference.family import Array, Number


class Totals:
    """Sums of several quantities over the same samples, and the number of samples.

    Means of means would be wrong as soon as two batches, or two ranks, differ in size; sums and
    counts are exact.

    Parameters
    ----------
    names : iterable of str
        What is summed: "loss", "accuracy".
    xp : module
        Array module in whose memory the sums are; `means` and `count` are for those on the host.

    Attributes
    ----------
    names : tuple of str
    values : Array of float64, shape (len(names) + 1,)
        The sums in the order of `names`, then the count. An allreduce of this array adds up all
        ranks.

    Examples
    --------
    >>> totals = Totals(["loss"])
    >>> totals.add(3, 6.0)
    >>> totals.add(1, 4.0)
    >>> totals.means()
    {'loss': 2.5}
    """

    def __init__(self, names: Iterable[str], xp: Any = np) -> None:
        self.names = tuple(names)
        self.values: Array = xp.zeros(len(self.names) + 1, "float64")

    @property
    def count(self) -> int:
        """Number of samples."""
        return int(self.values[-1])

    def add(self, count: int, *sums: Number) -> None:
        """Add the sums over `count` samples, in the order of `names`."""
        if len(sums) != len(self.names):
            raise ValueError(f"Totals: expected sums of {self.names}, got {len(sums)} numbers")
        for i, value in enumerate((*sums, count)):
            part = self.values[i : i + 1]  # of a device, too, which the host does not wait for
            part += value

    def load(self, values: Array) -> None:
        """Take the `values` of others with the same names.

        Raises
        ------
        ValueError
            If they have another shape; nothing is changed then.
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

    def means(self) -> dict[str, float]:
        """Divide the sums by the number of samples; NaN where there was none."""
        if not self.count:
            return dict.fromkeys(self.names, float("nan"))
        means = self.values[:-1] / self.values[-1]
        return dict(zip(self.names, means.tolist(), strict=True))
