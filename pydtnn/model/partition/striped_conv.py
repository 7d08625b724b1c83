"""Convolution of a stripe of a map, which exchanges its halo itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from pydtnn.kernels import ConvGeometry, Deferred
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.layers.collectives import Messages, Pending, Steps
from pydtnn.layers.communicating import CommunicatingFinisher
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.cost import Cost
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.parameters import Cut
from pydtnn.model.partition.stripes import Halo, Range, rows_of


def with_rows(geometry: ConvGeometry, dim: int, size: int, padding: Range) -> ConvGeometry:
    """Return a convolution with another size and padding of one axis."""
    sizes, paddings = list(geometry.size), list(geometry.padding)
    sizes[dim], paddings[dim] = size, padding
    g = geometry
    window = tuple(sizes), g.kernel, g.stride, tuple(paddings), g.dilation
    return ConvGeometry.shared(*window, g.channels, g.filters, g.groups)


class StripedConv2d(CommunicatingFinisher, FusedConv2d):
    """Convolution of a stripe of a map that is extended by its halo.

    It has the same parameters and fusion as `FusedConv2d`. The stripe is copied while its halo
    travels and is put next to it, in forward and, for dw, again in backward. For
    dx, dy is extended in the same way by the rows of other ranks whose windows read this stripe;
    the halo travels with these rows again, since keeping it would need as much memory as a thin
    stripe itself.

    Parameters
    ----------
    conv : Conv2d
        This rank's convolution of the extended stripe, not bound yet.
    halo : Halo
        Of the input.
    readers : Halo
        Of dy: the rows of the output that read this rank's rows of the input.
    around : (int, int)
        Padding of the convolution of the stripe alone that has `readers.needed` as its output.
    """

    def __init__(self, conv: Conv2d, halo: Halo, readers: Halo, around: Range) -> None:
        super().__init__(conv)
        self.halo, self.readers, self._around = halo, readers, around

    def communicates(self, *, training: bool, joint: bool) -> bool:
        """Return True."""
        return True

    def build(self, *shapes: Shape) -> Shape:
        """Declare parameters; the convolution reads the extended stripe."""
        dim, shape = self.halo.cut.dim, list(self.single(shapes))
        shape[dim] = self.halo.needed[1] - self.halo.needed[0]
        result = super().build(tuple(shape))
        self.alone = with_rows(self.geometry, dim, shapes[0][dim], self._around)
        return result

    def forward_steps(self, *xs: Array | Deferred, context: StepContext, joint: bool) -> Steps:
        """Copy the stripe while its halo travels, then convolve both."""
        (x,), halo = xs, self.halo
        if isinstance(x, Deferred) and self._stores(x, context):
            x.array = self.array(x)
        places = halo.places(x, self.backend)
        pending: Pending = yield Messages(self._halo_sends(x), places, halo.cut.axis)
        extended = self._extend(x, halo)
        _put(extended, halo, pending.wait())
        y, saved = FusedConv2d.forward(self, extended, context=context)
        return y, (x, *saved[1:])

    def _extend(self, x: Array | Deferred, halo: Halo) -> Array:
        """Copy own rows into a new array with room for a halo."""
        shape = list(x.shape)
        shape[halo.dim] = halo.needed[1] - halo.needed[0]
        extended = self.backend.empty(tuple(shape), x.dtype)
        if halo.kept:
            own = extended[halo.rows(halo.kept, halo.needed[0])]
            deferred = isinstance(x, Deferred) and x.array is None and not x.keep
            if deferred and halo.kept == halo.own:
                self.backend.fused.evaluate(x, out=own)
            else:
                own[...] = self.array(x)[halo.rows(halo.kept, halo.own[0])]
        return extended

    def _halo_sends(self, x: Array | Deferred) -> list[tuple[Array, int]]:
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

    def gated_steps(
        self, dy: Array | Deferred, saved: Saved, so_far: Array | None, gate: Deferred | None
    ) -> Steps:
        """Compute dw from the extended stripe, and dx from the extended dy."""
        (x, *y), conv, w = saved, self.backend.conv, self.w
        halo, readers = self.halo, self.readers
        dy = self.array(self._backward_bias(dy, *y))
        sends, receives = [], []
        if not w.frozen:
            sends, receives = self._halo_sends(x), halo.places(x, self.backend)
        rows = len(receives)
        if self.needs_dx:
            sends += [(dy[readers.rows(part, readers.own[0])], r) for r, part in readers.sends]
            receives += readers.places(dy, self.backend)
        pending: Pending = yield Messages(sends, receives, halo.cut.axis)
        received = pending.wait()
        if not w.frozen:
            extended = self._extend(x, halo)
            _put(extended, halo, received[:rows])
            conv.backward_filter(extended, dy, self.geometry, out=w.grad, accumulate=w.accumulate)
            del extended
        if not self.needs_dx:
            return None
        wide = self._extend(dy, readers)
        _put(wide, readers, received[rows:])
        dx = so_far
        if dx is None:
            dx = self.empty(len(wide), self.input_shapes[0])
        sums = None
        if gate is not None:
            sums = self.backend.empty((1 + len(gate.terms), self.geometry.channels), "float64")
        conv.backward_data(wide, w.value, self.alone, out=dx, add=so_far, gate=gate, sums=sums)
        return dx if sums is None else Deferred.of(dx, sums)

    def cost(self, batch: int) -> Cost:
        """The convolutions of the extended stripe and of the extended dy, and their copies."""
        (stripe, outputs), weights = self.elements(batch), self.w.size
        extended = batch * prod(self.geometry.size) * self.geometry.channels
        wide = batch * prod(self.alone.output) * self.geometry.filters
        dw, dx, db = not self.w.frozen, self.needs_dx, self._differentiates_bias()
        itemsize, flops = self.dtype.itemsize, self.geometry.flops(batch)
        copies = stripe + 2 * extended
        backward = dw * (copies + outputs) + dx * (outputs + 2 * wide + stripe + weights)
        evaluated = 2 * outputs * (self.norm is not None)  # dy is stored
        moved = (backward + db * outputs + evaluated) * itemsize
        return self.fused_cost(batch) + Cost(
            flops,
            flops * dw + self.alone.flops(batch) * dx + outputs * (self.bias and not self.b.frozen),
            (copies + outputs + weights) * itemsize,
            moved + weights * dw * self.parameter_dtype.itemsize,
        )


def _put(extended: Array, halo: Halo, received: Sequence[Array]) -> None:
    for (_, rows), array in zip(halo.receives, received, strict=True):
        extended[halo.rows(rows, halo.needed[0])] = array


def readers_of(window: ConvGeometry, halo: Halo, outputs: Cut) -> tuple[Halo, Range] | None:
    """Return the rows of the output that read each rank's stripe, and the padding around it.

    None if there are ranks for which the convolution of the stripe alone does not give these rows,
    because windows do not read its first or last rows.

    Parameters
    ----------
    window : ConvGeometry
        The convolution of the whole map.
    halo : Halo
        Of the input.
    outputs : Cut
        Rows of the output of each rank.
    """
    dim = halo.cut.dim
    k, s, d = window.kernel[dim], window.stride[dim], window.dilation[dim]
    before, extent, size = window.padding[dim][0], (k - 1) * d + 1, window.output[dim]
    needed: list[Range] = []
    paddings: list[Range] = []
    for start, stop in pairwise(halo.cut.bounds):
        first = max((start + before - extent) // s + 1, 0)
        last = min(-(-(stop + before) // s), size)
        around = start - (first * s - before), (last - 1) * s - before + extent - stop
        if first >= last or around[0] < 0 or around[1] <= -s or max(around) >= extent:
            return None
        needed.append((first, last))
        paddings.append((around[0], max(around[1], 0)))
    return Halo(outputs, needed, halo.place), paddings[halo.place]
