"""Outputs that are not kept for backward, but computed again where it reads them.

A normalisation or an activation keeps its input for its own backward pass, and its output is a few
operations per element away from that input. The layers that read the output then need not keep it
too: of an MLP of a transformer, this leaves the input of the activation only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from pydtnn.kernels import Deferred
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.cost import Cost


@dataclass(frozen=True)
class Regathered:
    """How to gather an output from the parts of ranks again.

    The backward loop does so before it runs the layer that has saved this (`kept`), which receives
    the array instead.

    Parameters
    ----------
    steps : callable
        Returns a generator of collectives, see `pydtnn.layers.collectives`.

    References
    ----------
    Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022,
    section 4.2.2.
    """

    steps: Callable[[], Generator[Any, Any, Array]]


@dataclass(frozen=True)
class Recomputed:
    """An output, and how to compute it again.

    Parameters
    ----------
    array : Array
        The values, for forward.
    again : callable or GatheredAgain
        Returns the same bytes in new memory. It refers to arrays that its layer saves anyway.
    """

    array: Array
    again: Callable[[], Array] | Regathered

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> Any:
        """Type of the values."""
        return self.array.dtype


Value = Array | Deferred | Recomputed
"""An output of a layer in a form in which others may receive it."""


class Recomputing:
    """Mixin for layers that can return their output as `Recomputed`, if they support "recomputing".

    Attributes
    ----------
    recomputed : bool
        Set by the graph, if all layers that read the output take `Recomputed`: `forward` returns
        it.
    """

    recomputed = False

    def with_readers(self, cost: Cost) -> Cost:
        """Return the cost of the layer, with that of computing its output again."""
        return cost.with_second_forward() if self.recomputed else cost


def kept(x: Array | Recomputed) -> Any:
    """Return what a layer saves of an input."""
    return x.again if isinstance(x, Recomputed) else x


def restored(saved: Any) -> Array:
    """Return the input of which `kept` was saved."""
    return saved() if callable(saved) else saved
