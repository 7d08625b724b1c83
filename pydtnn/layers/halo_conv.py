"""Base class of convolutions of stripes, which exchange their halos."""

from __future__ import annotations

from abc import abstractmethod

from pydtnn.kernels import ConvGeometry, Deferred
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved
from pydtnn.layers.collectives import Steps
from pydtnn.layers.communicating import CommunicatingFinisher
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.stripes import Halo, Range, rows_of


class HaloConv2d(CommunicatingFinisher, FusedConv2d):
    """A convolution of a stripe of the map, with the same parameters and fusion as `FusedConv2d`.

    Parameters
    ----------
    conv : Conv2d
        This rank's convolution, not bound yet.
    halo : Halo
        Rows of the input.
    """

    def __init__(self, conv: Conv2d, halo: Halo) -> None:
        super().__init__(conv)
        self.halo = halo

    def communicates(self, *, training: bool, joint: bool) -> bool:
        """Return True."""
        return True

    def halo_sends(self, x: Array | Deferred) -> list[tuple[Array, int]]:
        """Return the rows that other ranks need, and these ranks."""
        halo = self.halo
        return [(rows_of(self, x, halo.rows(rows, halo.own[0])), r) for r, rows in halo.sends]

    def backward_steps(self, dy: Array | Deferred, saved: Saved, *, joint: bool) -> Steps:
        """Compute dw, db and dx."""
        return self.gated_steps(dy, saved, None, None)

    def finish_steps(self, dy: Array | Deferred, saved: Saved, so_far: Array | None) -> Steps:
        """Compute the same, add `so_far` to dx, and gate dx by the ReLU of a deferred input."""
        x = saved[0]
        gate = x if isinstance(x, Deferred) and self.backend.gates else None
        return self.gated_steps(dy, saved, so_far, gate)

    @abstractmethod
    def gated_steps(
        self, dy: Array | Deferred, saved: Saved, so_far: Array | None, gate: Deferred | None
    ) -> Steps:
        """Compute the gradients; add `so_far` to dx and apply the mask of `gate`, if any."""


def with_rows(geometry: ConvGeometry, dim: int, size: int, padding: Range) -> ConvGeometry:
    """Return a convolution with another size and padding of one axis."""
    sizes, paddings = list(geometry.size), list(geometry.padding)
    sizes[dim], paddings[dim] = size, padding
    return ConvGeometry.shared(
        tuple(sizes),
        geometry.kernel,
        geometry.stride,
        tuple(paddings),
        geometry.dilation,
        geometry.channels,
        geometry.filters,
        geometry.groups,
    )
