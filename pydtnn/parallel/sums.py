"""Sums of the gradients of a step over all ranks.

Schemes that sum gradients use a `Sums`: this one calls the communicator's allreduce; subclasses
compress messages, or sum in an order that does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.layers.parameters import Bucket
from pydtnn.utils.request import Request


def sum_in_order(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Add arrays from left to right into a new one."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def average(comm: Communicator, arrays: Iterable[np.ndarray], weight: float) -> None:
    """Average arrays over all ranks in place, weighted by `weight`. Collective: all ranks call it.

    If all weights are 0, arrays are unchanged, as is an array if a rank fails meanwhile.
    """
    total = np.array([weight], "float64")
    comm.allreduce(total)
    for array in arrays if total[0] else ():
        mean = array * (weight / float(total[0]))
        comm.allreduce(mean)
        array[...] = mean


class Sums:
    """Sums of gradients over all ranks, by the communicator's own allreduce.

    Every method is collective: all ranks call it, in the same order.

    Parameters
    ----------
    comm : Communicator

    Attributes
    ----------
    shards : int or None
        Number of shards of a batch, for any number of ranks. None: any number, and backward
        accumulates the gradients of a rank's shards.
    capturable : bool
        Class attribute: whether sums of device arrays run only on device and communicator and are
        the same in every step, so that they can be captured in a CUDA graph.
    keeps_gradients : bool
        Class attribute: whether residuals of a step's gradients are added to those of the next.
    """

    shards: int | None = None
    capturable = True
    keeps_gradients = False

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def prepare(self, buckets: tuple[Bucket, ...]) -> None:
        """Initialize the sums for these buckets; called before the first step."""

    def free(self) -> None:
        """Free the groups that `prepare` has created. Collective; repeated calls have no effect."""

    def begin(self, samples: int) -> None:
        """Start a step on a batch of `samples` samples of all ranks."""

    def slots(self, shards: int, buckets: Iterable[Bucket]) -> Sequence[int] | None:
        """Sets of gradients (`Bucket.gradients`) for next shards of buckets; None: one for all."""
        return None

    def push(self, shard: int | None, bucket: Bucket, grads: np.ndarray) -> None:
        """Add a bucket's gradients of one shard; None for a rank without shards."""

    def start(self, bucket: Bucket) -> Request:
        """Start to replace the gradients of a bucket by their sum over all ranks.

        Several requests can be pending. The gradients must be neither read nor written before the
        request is complete.
        """
        return self.comm.iallreduce(bucket.grads)

    def add_up(self, parts: Sequence[tuple[int | None, np.ndarray]]) -> tuple[np.ndarray, Request]:
        """Start to add up small arrays of all shards of all ranks: losses, statistics.

        Parameters
        ----------
        parts : sequence of (int or None, ndarray)
            This rank's shards and the contribution of each, 1-D of the same length; at least one.
            None is a rank without shards, with contribution 0.

        Returns
        -------
        total : ndarray
            The sum, once the request is complete.
        request : Request
        """
        total = sum_in_order([array for _, array in parts])
        return total, self.comm.iallreduce(total)

    def part(self, bucket: Bucket, counts: Sequence[int], out: np.ndarray) -> None:
        """Compute each rank's part of the sum, as in `Communicator.reduce_scatter`."""
        self.comm.reduce_scatter(bucket.grads, counts, out)

    def arrays(self) -> Iterable[tuple[str, np.ndarray]]:
        """Return the name and array of what is kept between steps, such as residuals."""
        return ()

    def state(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: arrays by name, and JSON values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state`; called after `prepare`."""
