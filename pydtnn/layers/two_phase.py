"""Layers that normalise with sums over a batch, of which a rank may see a part only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pydtnn.kernels import Deferred
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, StepContext


class TwoPhase(ABC):
    """Mixed into layers whose forward and backward pass each begin with sums over the batch.

    Where batch norm is synchronised, the model asks all shards for their sums first, and hands
    their total to each of them. Otherwise `forward` and `backward` take the shard's own.
    """

    @abstractmethod
    def forward_sums(self, *xs: Array | Deferred, context: StepContext) -> Array:
        """Return what this shard contributes to the forward pass: float64, one axis."""

    @abstractmethod
    def forward(
        self, *xs: Any, context: StepContext, total: Array | None = None
    ) -> tuple[Any, Saved]:
        """Compute the output with the total of `forward_sums` of all shards; see `Layer`."""

    @abstractmethod
    def backward_sums(self, dy: Any, saved: Saved) -> tuple[Any, Array]:
        """Return what `backward_rest` needs of dy, and this shard's contribution, as above."""

    @abstractmethod
    def backward_rest(self, needed: Any, saved: Saved, total: Array | None = None) -> Any:
        """Compute each input's gradient with the total, those of parameters with one's own sums."""

    def backward(self, dy: Any, saved: Saved) -> Any:
        """Compute each input's gradient, and write those of parameters."""
        needed, _ = self.backward_sums(dy, saved)
        return self.backward_rest(needed, saved)
