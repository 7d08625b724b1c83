"""Layers whose forward pass is repeated from small arrays that were kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pydtnn.layers.base import Saved, StepContext


class Repeatable(ABC):
    """Mixin for layers that keep small arrays when their other values are dropped.

    With recomputation, backward repeats the forward pass of layers whose values were dropped. A
    layer that computes statistics or adds sums of all ranks keeps these instead: they are computed,
    and sent, once per step.

    Attributes
    ----------
    repeats : bool
        Whether `forward_again` is used. False for a subclass that overrides `forward` only: its
        `forward` is repeated, like that of other layers.
    """

    repeats = True

    def __init_subclass__(cls) -> None:
        """Disable `forward_again` for a subclass that overrides only `forward`."""
        super().__init_subclass__()
        own = vars(cls).keys()
        if "forward" in own and "forward_again" not in own:
            cls.repeats = False

    @abstractmethod
    def kept(self, saved: Saved) -> Any:
        """Return the small values of `saved` that `forward_again` requires."""

    @abstractmethod
    def forward_again(self, *xs: Any, context: StepContext, kept: Any) -> tuple[Any, Saved]:
        """Compute the same bytes as `forward` from the same inputs and the kept values."""
