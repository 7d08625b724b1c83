"""How gradients are exchanged.

A parallel scheme is a small object that sees buckets, an optimizer and a communicator; it never
sees a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.comm.communicator import Communicator, Request
from pydtnn.comm.metered import Metered
from pydtnn.parameters import Bucket

if TYPE_CHECKING:
    from pydtnn.optimizers import Optimizer


class GradientExchange:
    """What the ranks say to each other in one training step; this one says nothing.

    A scheme overrides what it needs. Every method is collective: all ranks call it, in the same
    order.

    Parameters
    ----------
    comm : Communicator

    Attributes
    ----------
    comm : Metered
        The communicator, counting what goes through it in ``comm.traffic``.
    buckets : tuple of Bucket
        The model's parameters and gradients, known after `start`.
    samples : int
        Samples this rank has trained on since parameters were last averaged; the trainer counts
        them.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = Metered(comm)
        self.buckets: tuple[Bucket, ...] = ()
        self.samples = 0

    def loss_scale(self, local: int, total: int) -> float:
        """Factor on the gradient of a rank's summed loss.

        Parameters
        ----------
        local, total : int
            Samples of this rank and of all ranks in this step.
        """
        return 1 / total

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        """Begin training from rank 0's parameters; where training is resumed, `load` follows."""
        self.buckets = buckets
        for bucket in buckets:
            self.comm.broadcast(bucket.values)

    def bucket_ready(self, bucket: Bucket) -> None:
        """Learn that a bucket's gradients are complete; called in the same order on every rank."""

    def progress(self) -> None:
        """Get a moment of time between two layers of backward, to move messages along."""

    def update(self, optimizer: Optimizer) -> None:
        """Update the parameters; called after backward."""
        optimizer.step()

    def abandon(self) -> None:
        """Complete what is under way and forget it: the step will not be made."""

    def average_parameters(self) -> None:
        """Average the parameters of all ranks.

        Each counts by the samples it has trained on since the last time. Called before evaluating
        and saving, too; schemes that keep parameters equal override it with nothing.
        """
        total = np.array([self.samples], "float64")
        self.comm.allreduce(total)
        for bucket in self.buckets if total[0] else ():
            bucket.values[...] *= self.samples / float(total[0])
            self.comm.allreduce(bucket.values)
        self.samples = 0

    def state(self) -> dict[str, Any]:
        """What must be saved to continue: named arrays and numbers."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned, after `start`."""


class AllReduce(GradientExchange):
    """Synchronous data parallelism: gradients are summed over all ranks, bucket by bucket.

    Parameters
    ----------
    comm : Communicator
    overlap : bool
        Send each bucket as soon as backward completes it, while the rest of backward still runs.
        Without, all are sent after backward, one after the other: the same sums, so that the gain
        of overlap can be measured.

    References
    ----------
    Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
    section 3.2.
    """

    def __init__(self, comm: Communicator, *, overlap: bool = True) -> None:
        super().__init__(comm)
        self.overlap = overlap
        self.requests: dict[int, Request] = {}

    def bucket_ready(self, bucket: Bucket) -> None:
        """Start to sum the bucket's gradients."""
        if self.overlap:
            self.requests[bucket.index] = self.comm.iallreduce(bucket.grads)

    def progress(self) -> None:
        """Poke the oldest message: MPI moves data only while it is called."""
        for request in self.requests.values():
            if not request.test():
                break

    def update(self, optimizer: Optimizer) -> None:
        """Update each bucket as its sum arrives."""
        optimizer.step(self.wait)

    def average_parameters(self) -> None:
        """Do nothing: parameters are equal on all ranks."""

    def abandon(self) -> None:
        """Wait for the messages; nobody reads them."""
        for request in self.requests.values():
            request.wait()
        self.requests.clear()

    def wait(self, bucket: Bucket) -> None:
        """Return when the bucket's gradients are summed over all ranks."""
        if self.overlap:
            self.requests.pop(bucket.index).wait()
        else:
            self.comm.allreduce(bucket.grads)
