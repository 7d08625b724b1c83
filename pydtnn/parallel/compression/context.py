"""What a compressor may know besides the gradients: random numbers, and where parameters begin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pydtnn.kernels.reference.random import stream


@dataclass(frozen=True)
class Context:
    """Whose gradients are compressed, and when.

    Random numbers depend on this alone, so they are the same on every machine and after resuming,
    and who restores draws the numbers that were drawn when the gradients were compressed.

    Parameters
    ----------
    seed : int
        Of the random numbers.
    step : int
        How many times the bucket has been sent before.
    bucket : int
        Its index.
    rank : int
        The rank whose gradients they are.
    sizes : tuple of int
        Lengths of the parameters, one after the other, whose gradients they are.
    """

    seed: int
    step: int
    bucket: int
    rank: int
    sizes: tuple[int, ...]

    @property
    def random(self) -> np.random.Generator:
        """Philox at the beginning of the numbers that belong to this rank, bucket and step."""
        return self._generator(1 + self.rank)

    @property
    def shared_random(self) -> np.random.Generator:
        """Philox at the beginning of numbers that are the same on all ranks."""
        return self._generator(0)

    def of(self, rank: int) -> Context:
        """Say the same of another rank."""
        return replace(self, rank=rank)

    def _generator(self, who: int) -> np.random.Generator:
        key = np.array([self.seed % 2**64, stream("compression")], "uint64")
        counter = np.array([0, self.step, self.bucket, who], "uint64")
        return np.random.Generator(np.random.Philox(counter=counter, key=key))
