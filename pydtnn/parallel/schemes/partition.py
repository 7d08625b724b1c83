"""What schemes have in common whose ranks update and keep state of a part of each bucket."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.kernels.reference.family import Number
from pydtnn.layers.parameters import ALIGNMENT, Bucket
from pydtnn.parallel.exchange import GradientExchange


class Partition(GradientExchange):
    """Every element belongs to one rank, which updates it; the optimizer keeps no other state.

    Attributes
    ----------
    counts : dict of int to list of int
        Length of each rank's part of a bucket, in the order of the ranks, by the bucket's index;
        known once the optimizer is bound.
    """

    equal = True

    def __init__(self, comm: Communicator, **options: Any) -> None:
        super().__init__(comm, **options)
        self.counts: dict[int, list[int]] = {}
        self._divided: dict[int, Bucket] = {}

    def broadcast_parameters(self) -> None:
        """Copy rank 0's parameters to all ranks.

        Raises
        ------
        ValueError
            If the parts are no longer those of this model: another optimizer has been bound since.
        """
        if any(self._divided.get(bucket.index) is not bucket for bucket in self.buckets):
            raise ValueError(
                f"{type(self).__name__}: the exchange partitions the parameters of another model, "
                "bound by a later trainer; create one exchange per trainer"
            )
        super().broadcast_parameters()

    def divide(self, bucket: Bucket, whole: bool) -> list[int]:
        """Say how long each rank's part of a bucket is; by default all ranks end up with as much.

        Parameters
        ----------
        bucket : Bucket
        whole : bool
            Whether no parameter may be cut.
        """
        if whole:
            places = np.array([entry.slice.start for entry in bucket.parameters])
        else:
            # Whole cache lines: vector instructions then see the same elements together as where
            # one rank updates all, so that the results are the same bits.
            places = np.arange(0, len(bucket.values), ALIGNMENT // bucket.values.itemsize)
        return level(self.loads(bucket), np.append(places, len(bucket.values)))

    def loads(self, bucket: Bucket) -> np.ndarray:
        """Return how much of the other buckets each rank has."""
        others = [counts for index, counts in self.counts.items() if index != bucket.index]
        return np.sum([[0] * self.comm.size, *others], axis=0)

    def own(self, bucket: Bucket, whole: bool) -> slice:
        """Return the stretch of a bucket that this rank updates."""
        self.counts[bucket.index] = self.divide(bucket, whole)
        self._divided[bucket.index] = bucket
        return self.stretch(bucket)

    def stretch(self, bucket: Bucket) -> slice:
        """Return what `own` has chosen."""
        counts = self.counts[bucket.index]
        start = sum(counts[: self.comm.rank])
        return slice(start, start + counts[self.comm.rank])

    def gather(self, bucket: Bucket, part: np.ndarray) -> np.ndarray:
        """Put together an array as long as the bucket from the parts of all ranks."""
        whole = np.empty_like(part, shape=len(bucket.values))
        self.comm.allgather(part, self.counts[bucket.index], whole)
        return whole

    def total(self, value: Number) -> Number:
        """Add up the ranks' numbers."""
        is_plain = isinstance(value, float | int)
        array = np.array([value]) if is_plain else value.reshape(1).copy()
        self.comm.allreduce(array)
        return float(array[0]) if is_plain else array.reshape(())


def level(loads: np.ndarray, places: np.ndarray) -> list[int]:
    """Cut a stretch into parts for all ranks so that their loads become even, like water.

    Parameters
    ----------
    loads : ndarray of int, shape (P,)
        What each rank has so far.
    places : ndarray of int
        Where a cut is allowed, from 0 to the length of the stretch.

    Returns
    -------
    list of int
        Lengths of the P parts, which lie in the order of the ranks; some may be 0.

    Examples
    --------
    >>> level(np.array([0, 0, 6]), np.arange(11))
    [5, 5, 0]
    >>> level(np.array([0, 10, 0]), np.array([0, 8, 10]))
    [8, 0, 2]
    """
    length = places[-1]
    # If the water stood above the k lowest ranks alone; where it stands is the least of these.
    surface = ((length + np.cumsum(np.sort(loads))) / np.arange(1, len(loads) + 1)).min()
    wanted = np.cumsum(np.maximum(surface - loads, 0))[:-1]
    nearest = places[np.searchsorted((places[1:] + places[:-1]) / 2, wanted)]
    return np.diff(nearest, prepend=0, append=length).tolist()
