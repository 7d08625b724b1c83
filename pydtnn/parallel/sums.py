"""How the gradients of one step are added up over the ranks.

Schemes that sum gradients leave it to a `Sums`: this one hands them to the communicator; others
compress them on the way, or add them up in an order that does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator, Request
from pydtnn.layers.parameters import Bucket


def sum_in_order(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Add arrays from left to right into a new one."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def average(comm: Communicator, arrays: Iterable[np.ndarray], weight: float) -> None:
    """Average arrays over all ranks, in place; each counts by its weight. Collective.

    Where all weights are 0, nothing is changed.
    """
    total = np.array([weight], "float64")
    comm.allreduce(total)
    for array in arrays if total[0] else ():
        array *= weight / float(total[0])
        comm.allreduce(array)


class Sums:
    """Sums of gradients over all ranks, by the communicator's own allreduce.

    Every method is collective: all ranks call it, in the same order.

    Parameters
    ----------
    comm : Communicator

    Attributes
    ----------
    shards : int or None
        Into how many shards a batch must be cut, whatever the number of ranks. None: into whatever
        suits, and the gradients of a rank's shards are added up by backward.
    capturable : bool
        Of the class: whether sums of device arrays are work of the device and the communicator
        alone, the same in every step, so that they may be captured in a CUDA graph.
    keeps_gradients : bool
        Of the class: whether what is left of one step's gradients is added to the next one's.
    """

    shards: int | None = None
    capturable = True
    keeps_gradients = False

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def prepare(self, buckets: tuple[Bucket, ...]) -> None:
        """Learn the buckets, before the first step."""

    def free(self) -> None:
        """Free the groups that `prepare` has split off. Collective; it may be called again."""

    def begin(self, samples: int) -> None:
        """Begin a step on a batch of so many samples of all ranks."""

    def slots(self, shards: int) -> Sequence[int] | None:
        """Sets of gradients (`Bucket.gradients`) for this rank's next shards; None: one for all."""
        return None

    def push(self, shard: int | None, bucket: Bucket, grads: np.ndarray) -> None:
        """Take a bucket's gradients of one of these shards; None is no shard at all."""

    def start(self, bucket: Bucket) -> Request:
        """Start to replace the gradients of a bucket by their sum over all ranks.

        Several may be under way. The gradients are neither read nor written before the request is
        complete.
        """
        return self.comm.iallreduce(bucket.grads)

    def add_up(self, parts: Sequence[tuple[int | None, np.ndarray]]) -> tuple[np.ndarray, Request]:
        """Start to add up small arrays of all shards of all ranks: losses, statistics.

        Parameters
        ----------
        parts : sequence of (int or None, ndarray)
            This rank's shards and what each contributes, 1-D of one length; at least one. None
            stands for a rank without a shard, whose contribution is 0.

        Returns
        -------
        total : ndarray
            The sum, once the request is complete.
        request : Request
        """
        total = sum_in_order([array for _, array in parts])
        return total, self.comm.iallreduce(total)

    def part(self, bucket: Bucket, counts: Sequence[int], out: np.ndarray) -> None:
        """Leave each rank its part of the sum, as `Communicator.reduce_scatter` does."""
        self.comm.reduce_scatter(bucket.grads, counts, out)

    def state(self) -> dict[str, Any]:
        """What must be saved to continue: arrays by name, and what JSON can tell."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned, after `prepare`."""
