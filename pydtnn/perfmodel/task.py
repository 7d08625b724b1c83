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
    """

    net: Net
    input_shape: tuple[int, ...]
    name: str = "network"
    global_batch: int = 256
    samples: int = 1_280_000
    slots: int = 1
    dtype: str = "float32"

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return ceil(self.samples / self.global_batch)
