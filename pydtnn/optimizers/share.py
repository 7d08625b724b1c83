"""Distribution of updates: all ranks update everything, or each rank its share."""

from __future__ import annotations

from typing import Protocol

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers.parameters import Bucket


class Share(Protocol):
    """The interface of an optimizer that updates only a part of each bucket."""

    def own(self, bucket: Bucket, whole: bool) -> slice:
        """Return the range of a bucket that this rank updates.

        Parameters
        ----------
        bucket : Bucket
        whole : bool
            Whether parameters must not be split, as the rule requires whole parameters.
        """

    def gather(self, bucket: Bucket, part: Array) -> Array:
        """Gather an array of the length of the bucket from all ranks. Collective."""

    def total(self, value: Number) -> Number:
        """Sum a number computed on each rank's ranges. Collective."""


class Whole:
    """The share of a rank that updates everything."""

    def own(self, bucket: Bucket, whole: bool) -> slice:
        """Return the whole bucket."""
        return slice(0, len(bucket.values))

    def gather(self, bucket: Bucket, part: Array) -> Array:
        """Return the array itself."""
        return part

    def total(self, value: Number) -> Number:
        """Return the number."""
        return value
