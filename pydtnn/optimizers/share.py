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


def views_of(bucket: Bucket, slots: tuple[Array, ...], first: int, run: slice) -> tuple[Array, ...]:
    """Return values, gradients and slots of a range of a bucket.

    Parameters
    ----------
    bucket : Bucket
    slots : tuple of Array
        State of a rule for this rank's range of the bucket, which begins at `first`.
    run : slice
        Elements of the bucket.
    """
    kept = slice(run.start - first, run.stop - first)
    return bucket.values[run], bucket.grads[run], *(slot[kept] for slot in slots)
