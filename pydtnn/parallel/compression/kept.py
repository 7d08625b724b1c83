"""Buffers of a bucket between steps: its gradients without padding, and the compression error."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pydtnn.layers.parameters import Bucket


class Kept:
    """The gradients of a bucket, contiguous, without the padding between parameters.

    Parameters
    ----------
    bucket : Bucket
    feedback : bool
        Whether the next gradients are added to `x`, which contains the compression error.

    Attributes
    ----------
    sizes : tuple of int
        Lengths of the parameters.
    x : ndarray (n,)
        Values to compress; with feedback, the compression error between steps.
    total : ndarray (n,)
        Buffer for restored values.
    """

    def __init__(self, bucket: Bucket, feedback: bool) -> None:
        self.feedback = feedback
        self._places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self._runs: list[tuple[slice, slice]] = []  # without padding: in the bucket, in `x`
        size = 0
        for entry in bucket.parameters:
            there, here = entry.slice, slice(size, size + entry.slice.stop - entry.slice.start)
            self._places[entry.name] = here, entry.shape
            if self._runs and self._runs[-1][0].stop == there.start:
                before, ours = self._runs.pop()
                there, here = slice(before.start, there.stop), slice(ours.start, here.stop)
            self._runs.append((there, here))
            size = here.stop
        self.sizes = tuple(e.slice.stop - e.slice.start for e in bucket.parameters)
        self.x = np.zeros(size, bucket.grads.dtype)
        self.total = np.empty_like(self.x)

    def take(self, grads: np.ndarray) -> np.ndarray:
        """Copy a bucket's gradients to `x`, added to the error; return a read-only view of it."""
        for there, here in self._runs:
            if self.feedback:
                self.x[here] += grads[there]
            else:
                self.x[here] = grads[there]
        read_only = self.x.view()
        read_only.flags.writeable = False
        return read_only

    def give(self, grads: np.ndarray) -> None:
        """Copy `total` to a bucket's gradients."""
        for there, here in self._runs:
            grads[there] = self.total[here]

    def errors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name and compression error of each parameter, with feedback."""
        if self.feedback:
            for name, (here, shape) in self._places.items():
                yield f"error/{name}", self.x[here].reshape(shape)
