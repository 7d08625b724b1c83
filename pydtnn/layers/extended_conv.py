"""Convolution of a stripe with its halo."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels import Deferred
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.layers.collectives import Pending, Steps
from pydtnn.layers.communicating import CommunicatingFinisher
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.stripes import Halo, rows_of


class ExtendedConv2d(CommunicatingFinisher, FusedConv2d):
    """Convolution of a stripe that is extended by its halo, with the same parameters.

    Stripe and halo are copied next to each other, in forward and again in backward, so that only
    the halo is kept. `StripedConv2d` needs no copy, but computes the rows at the edges twice.

    Parameters
    ----------
    conv : Conv2d
        This rank's convolution of the extended stripe, not bound yet.
    halo : Halo
    """

    def __init__(self, conv: Conv2d, halo: Halo) -> None:
        super().__init__(conv)
        self.halo = halo

    def build(self, *shapes: Shape) -> Shape:
        """Declare parameters; the convolution reads the extended stripe."""
        shape = list(self.single(shapes))
        shape[self.halo.cut.dim] = self.halo.needed[1] - self.halo.needed[0]
        return super().build(tuple(shape))

    def forward_steps(self, *xs: Array | Deferred, context: StepContext, joint: bool) -> Steps:
        """Copy the stripe while its halo travels, then convolve both."""
        (x,), halo = xs, self.halo
        if isinstance(x, Deferred) and self._stores(x, context):
            x.array = self.array(x)
        sends = [(rows_of(self, x, halo.rows(rows, halo.own[0])), r) for r, rows in halo.sends]
        pending: Pending = yield halo.messages(sends, halo.receives, x, self.backend)
        extended = self._extend(x)
        rows = pending.wait()
        self._put(extended, rows)
        y, saved = FusedConv2d.forward(self, extended, context=context)
        return y, (x, rows, *saved[1:])

    def _extend(self, x: Array | Deferred) -> Array:
        """Copy own rows into a new array with room for the halo."""
        halo = self.halo
        size = (*self.geometry.size, self.geometry.channels)
        extended = self.empty(len(x), size)
        if halo.kept:
            own = self.array(x)[halo.rows(halo.kept, halo.own[0])]
            extended[halo.rows(halo.kept, halo.needed[0])] = own
        return extended

    def _put(self, extended: Array, received: list[Array]) -> None:
        for (_, rows), array in zip(self.halo.receives, received, strict=True):
            extended[self.halo.rows(rows, self.halo.needed[0])] = array

    def backward_steps(self, dy: Array | Deferred, saved: Saved, *, joint: bool) -> Steps:
        """Compute the gradients of the extended stripe; return those of the halo to its owners."""
        return self.finish_steps(dy, saved, None)

    def finish_steps(self, dy: Array | Deferred, saved: Saved, so_far: Array | None) -> Steps:
        """Compute the same and add `so_far` to dx."""
        (x, rows, *y), halo = saved, self.halo
        extended = self._extend(x)
        self._put(extended, rows)
        wide: Any = self._backward_products(extended, self._backward_bias(dy, *y), None, None)
        del extended
        if not self.needs_dx:
            return None
        pending: Pending = yield halo.give_back(wide, self.backend)
        first = halo.own[0]
        dx = so_far
        if dx is None:
            dx = self.backend.empty((len(wide), *self.input_shapes[0]), wide.dtype)
            if halo.kept != halo.own:
                dx[...] = 0
        if halo.kept:
            place, own = halo.rows(halo.kept, first), wide[halo.rows(halo.kept, halo.needed[0])]
            if so_far is None:
                dx[place] = own
            else:
                dx[place] += own
        for (_, part), received in zip(halo.sends, pending.wait(), strict=True):
            dx[halo.rows(part, first)] += received
        return dx
