"""A training whose strategies are compared."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pydtnn.layers import Net


@dataclass(frozen=True)
class Task:
    """What is trained, without how ranks share it.

    Parameters
    ----------
    net : Net
        Layers or blocks that are not part of a model.
    input_shape : tuple of int
        Of a sample.
    name : str
    global_batch : int
        Samples of a step.
    samples : int
        Samples of an epoch.
    slots : int
        Slots of the optimizer: 1 for momentum, 2 for Adam.
    dtype : str
    bucket_bytes : int, optional
        Length of buckets, in B; by default the one of `Model` and of the rule between hosts.
    clips : bool
        Whether gradients are clipped.
    averages : bool
        Whether an average of the parameters is kept, too.
    loader_threads : int
        Threads of a rank that prepare batches while a step runs; with 0, steps wait for each batch.
    """

    net: Net
    input_shape: tuple[int, ...]
    name: str = "network"
    global_batch: int = 256
    samples: int = 1_280_000
    slots: int = 1
    dtype: str = "float32"
    bucket_bytes: int | None = None
    clips: bool = False
    averages: bool = False
    loader_threads: int = 1

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return ceil(self.samples / self.global_batch)
