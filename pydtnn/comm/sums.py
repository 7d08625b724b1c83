"""How the gradients of one step are added up over the ranks.

Schemes that sum gradients leave it to a `Sums`: this one hands them to the communicator; others
compress them on the way, or add them up in an order that does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator, Request
from pydtnn.parameters import Bucket


class Sums:
    """Sums of gradients over all ranks, by the communicator's own allreduce.

    Every method is collective: all ranks call it, in the same order.

    Parameters
    ----------
    comm : Communicator
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def prepare(self, buckets: tuple[Bucket, ...]) -> None:
        """Learn the buckets, before the first step."""

    def start(self, bucket: Bucket) -> Request:
        """Start to replace the gradients of a bucket by their sum over all ranks.

        Several may be under way. The gradients are neither read nor written before the request is
        complete.
        """
        return self.comm.iallreduce(bucket.grads)

    def part(self, bucket: Bucket, counts: Sequence[int], out: np.ndarray) -> None:
        """Leave each rank its part of the sum, as `Communicator.reduce_scatter` does."""
        self.comm.reduce_scatter(bucket.grads, counts, out)

    def state(self) -> dict[str, Any]:
        """What must be saved to continue: arrays by name, and what JSON can tell."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned, after `prepare`."""
