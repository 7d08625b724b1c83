"""The interface between the sources of compute times and what uses them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pydtnn.layers.base import Layer
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.utils.observer import HALVES, RECOMPUTED, layer_of


@dataclass(frozen=True, slots=True, order=True)
class Label:
    """Name of a segment: the time of a rank's main thread between two notifications of an observer.

    A segment belongs to the innermost activity in which it lies: the pass of a node, or a phase of
    training. Segments of one execution of an activity are numbered from 0; a striped convolution
    has one before its halo exchange starts, one until the wait, and one after it.

    Attributes
    ----------
    kind : str
        "forward" or "backward" of a node, or "phase".
    name : str
        Of the node or of the phase; a node's name has the suffix " (recomputed)" if its forward
        pass is repeated, and one of `HALVES` if backward is cut in two.
    index : int
        Number of the segment within the activity.
    """

    kind: str
    name: str
    index: int = 0

    @property
    def part(self) -> tuple[str, int]:
        """Name of the node; 0 for its forward pass, 1 for backward, 2 for a repeated forward."""
        again = self.name.endswith(RECOMPUTED)
        return layer_of(self.name), 2 if again else int(self.kind != "forward")

    @property
    def share(self) -> float:
        """Part of the pass of a layer: that of a half of backward is about 1/2."""
        return 0.5 if self.name.endswith(HALVES) else 1.0


class ComputeCosts(ABC):
    """Time of the parts of a step that are not communication, on one rank of a platform.

    Attributes
    ----------
    constant : bool
        Whether equal arguments always give the same time, which need not be computed again, except
        for phases, which may depend on what was asked before.
    """

    constant = False

    @abstractmethod
    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        """Return the time of a segment, in s.

        Parameters
        ----------
        label : Label
        layer : Layer or None
            The layer of the node with the shapes of this rank; None for a phase.
        batch : int
            Samples of the pass; a layer may compute a part of them on this rank.
        """

    def on(self, platform: Platform) -> ComputeCosts:
        """Return the costs on another platform; the same if they are not those of a platform."""
        return self


class NoCosts(ComputeCosts):
    """Computation takes no time, or not that of segments."""

    constant = True

    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        return 0.0
