"""Who updates what: all ranks everything, or each its share."""

from __future__ import annotations

from typing import Protocol

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers.parameters import Bucket


class Share(Protocol):
    """What an optimizer must know if it updates a part of each bucket only."""

    def own(self, bucket: Bucket, whole: bool) -> slice:
        """Return the stretch of a bucket that is updated here.

        Parameters
        ----------
        bucket : Bucket
        whole : bool
            Whether no parameter may be cut: the rule needs all of it at once.
        """

    def gather(self, bucket: Bucket, part: Array) -> Array:
        """Put together an array as long as the bucket from what all ranks hold. Collective."""

    def total(self, value: Number) -> Number:
        """Add up a number that each rank has of its own stretches. Collective."""


class Whole:
    """The share of a rank that updates everything."""

    def own(self, bucket: Bucket, whole: bool) -> slice:
        """Return the whole bucket."""
        return slice(0, len(bucket.values))

    def gather(self, bucket: Bucket, part: Array) -> Array:
        """Return what is there."""
        return part

    def total(self, value: Number) -> Number:
        """Return the number."""
        return value
