"""Base class of lossy sums: arrays that persist between steps, saved by parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pydtnn.comm.arrays import fill, on_host, to_host
from pydtnn.comm.chain import Chain
from pydtnn.comm.communicator import Communicator
from pydtnn.comm.request import Request
from pydtnn.layers.parameters import Bucket
from pydtnn.parallel.sums import Sums

STEPS = "compression_steps"


class LossySums(Sums):
    """Sums of gradients that are compressed with loss.

    They are computed on the host: gradients on a device are copied to the host, which blocks, and
    the sum is copied back.

    Parameters
    ----------
    comm : Communicator

    Attributes
    ----------
    group : Communicator
        A copy of `comm` with separate messages; from the first `prepare` to `free`.
    steps : dict of int to int
        Number of times each bucket has been sent, by its index.
    """

    capturable = False
    keeps_gradients = True

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self.group = comm
        self.steps: dict[int, int] = {}

    def prepare(self, buckets: tuple[Bucket, ...]) -> None:
        """Start at step 0. Collective: all ranks call it."""
        if self.group is self.comm:
            self.group = self.comm.split(0)
        self.steps = {bucket.index: 0 for bucket in buckets}

    def free(self) -> None:
        """Free the group. Collective: all ranks call it."""
        if self.group is not self.comm:
            self.group.free()
            self.group = self.comm

    def start(self, bucket: Bucket) -> Request:
        """Start to replace a bucket's gradients by their sum over all ranks."""
        return self.send(bucket) if on_host(bucket.grads) else Chain(self._through_host(bucket))

    def _through_host(self, bucket: Bucket) -> Iterator[Request]:
        mirror = replace(bucket, grads=to_host(bucket.grads))
        yield self.send(mirror)
        fill(bucket.grads, mirror.grads)

    @abstractmethod
    def send(self, bucket: Bucket) -> Request:
        """Implement `start` for a bucket with gradients on the host."""

    @abstractmethod
    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names and writeable arrays that persist between steps."""

    def part(self, bucket: Bucket, counts: Sequence[int], out: np.ndarray) -> None:
        """Compute each rank's part of the sum; the bucket's gradients become the sum, too."""
        self.start(bucket).wait()
        begin = sum(counts[: self.comm.rank])
        out[...] = bucket.grads[begin : begin + len(out)]

    def state(self) -> dict[str, Any]:
        """Return the arrays, which may differ between ranks, and the number of steps."""
        state: dict[str, Any] = {name: array.copy() for name, array in self.arrays()}
        return state | {STEPS: max(self.steps.values(), default=0)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state` after `prepare`; nothing changes if it does not fit."""
        arrays = dict(self.arrays())
        if STEPS not in state:
            raise ValueError(
                "checkpoint: expected the state of compression, got none, as its training did not "
                "compress gradients; continue without --compress"
            )
        for name, array in arrays.items():
            if name not in state or np.shape(state[name]) != array.shape:
                raise ValueError(
                    f"checkpoint: expected an array {name!r} of shape {array.shape}, got none; "
                    "continue with the same compressor and model"
                )
        for name, array in arrays.items():
            array[...] = state[name]
        self.steps = dict.fromkeys(self.steps, int(state[STEPS]))


def is_finite(array: np.ndarray) -> bool:
    """Return whether no element of a contiguous array is infinite or NaN."""
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):  # squares may overflow where elements are finite
        return bool(np.isfinite(np.dot(flat, flat)) or np.isfinite(flat).all())


def forget_if_not_finite(error: np.ndarray) -> None:
    """Set an error that is not finite to 0, as it would propagate to all following steps."""
    if not is_finite(error):
        error.fill(0)
