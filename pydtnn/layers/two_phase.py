"""Layers that normalise with sums over a batch that may be distributed over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pydtnn.kernels import Deferred
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, StepContext


class TwoPhase(ABC):
    """Mixin for layers with forward and backward passes that each start with sums over the batch.

    If batch norm is synchronised, the model first computes the sums of all shards and passes the
    total to each of them. Otherwise `forward` and `backward` use the sums of the shard.
    """

    @abstractmethod
    def forward_sums(self, *xs: Array | Deferred, context: StepContext) -> Array:
        """Return this shard's sums for the forward pass: float64, one axis."""

    @abstractmethod
    def forward(
        self, *xs: Any, context: StepContext, total: Array | None = None
    ) -> tuple[Any, Saved]:
        """Compute the output with the total of `forward_sums` of all shards; see `Layer`."""

    @abstractmethod
    def backward_sums(self, dy: Any, saved: Saved) -> tuple[Any, Array]:
        """Return the values that `backward_rest` requires, and this shard's sums, as above."""

    @abstractmethod
    def backward_rest(self, needed: Any, saved: Saved, total: Array | None = None) -> Any:
        """Compute inputs' gradients with the total, those of parameters with this shard's sums."""

    def backward(self, dy: Any, saved: Saved) -> Any:
        """Compute each input's gradient, and write those of parameters."""
        needed, _ = self.backward_sums(dy, saved)
        return self.backward_rest(needed, saved)
