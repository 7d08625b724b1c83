"""Context of a compressor call: random numbers and sizes of parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pydtnn.kernels.reference.random import stream


@dataclass(frozen=True)
class Context:
    """Rank, bucket and step of compressed gradients.

    Random numbers depend only on the context, so they are the same on every machine, after resuming
    training, and in `compress` and `restore`.

    Parameters
    ----------
    seed : int
        Seed of the random numbers.
    step : int
        Number of times the bucket has been sent before.
    bucket : int
        Index of the bucket.
    rank : int
        Rank that computed the gradients.
    sizes : tuple of int
        Lengths of the bucket's parameters, in order.
    """

    seed: int
    step: int
    bucket: int
    rank: int
    sizes: tuple[int, ...]

    @property
    def random(self) -> np.random.Generator:
        """Return a Philox generator for this rank, bucket and step."""
        return self._generator(1 + self.rank)

    @property
    def shared_random(self) -> np.random.Generator:
        """Return a Philox generator that is the same on all ranks."""
        return self._generator(0)

    def of(self, rank: int) -> Context:
        """Return the context of another rank."""
        return replace(self, rank=rank)

    def _generator(self, who: int) -> np.random.Generator:
        key = np.array([self.seed % 2**64, stream("compression")], "uint64")
        counter = np.array([0, self.step, self.bucket, who], "uint64")
        return np.random.Generator(np.random.Philox(counter=counter, key=key))
