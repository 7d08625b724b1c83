"""Convolution of a stripe of a map, which exchanges halos while it computes the interior."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from pydtnn.kernels import ConvGeometry, Deferred
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.layers.collectives import Messages, Pending, Steps
from pydtnn.layers.communicating import CommunicatingFinisher
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.cost import Cost
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.parameters import Cut
from pydtnn.layers.stripes import Halo, Index, Range, deferred_rows, join, rows_of


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
    g = geometry
    window = tuple(sizes), g.kernel, g.stride, tuple(paddings), g.dilation
    return ConvGeometry.shared(*window, g.channels, g.filters, g.groups)


class ExtendedConv2d(HaloConv2d):
    """Convolution of a stripe that is extended by its halo, with the same parameters.

    Stripe and halo are copied next to each other, in forward and, for dw, again in backward. For
    dx, dy is extended in the same way by the rows of other ranks whose windows read this stripe;
    the halo travels with these rows again, since keeping it would need as much memory as a thin
    stripe itself. `StripedConv2d` needs no copy, but computes the rows at the edges twice.

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
        super().__init__(conv, halo)
        self.readers, self._around = readers, around

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
        pending: Pending = yield halo.messages(self.halo_sends(x), halo.receives, x, self.backend)
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

    def gated_steps(
        self, dy: Array | Deferred, saved: Saved, so_far: Array | None, gate: Deferred | None
    ) -> Steps:
        """Compute dw from the extended stripe, and dx from the extended dy."""
        (x, *y), conv, w = saved, self.backend.conv, self.w
        halo, readers = self.halo, self.readers
        dy = self.array(self._backward_bias(dy, *y))
        sends, receives = [], []
        if not w.frozen:
            sends, receives = self.halo_sends(x), halo.places(x, self.backend)
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


EDGE_SHARE = 64
"""Number of rows of a stripe for each row at its edges, from which these are computed twice. A few
rows are convolved with a fraction of the speed of many: ResNet-18 with 224 x 224 images on two
ranks takes 13 % less time if stripes of 28 rows are copied instead."""


class Edge(NamedTuple):
    """Rows of the output, at one end of a stripe, with windows that reach into the halo.

    Attributes
    ----------
    outputs : (int, int)
        Rows of this rank's output.
    halo, own : (int, int)
        Rows of the map that these windows read: of other stripes, and of this one.
    geometry : ConvGeometry
        The convolution of these rows.
    """

    outputs: Range
    halo: Range
    own: Range
    geometry: ConvGeometry


class Link(NamedTuple):
    """Rows of a stripe that are read by windows of another rank.

    Attributes
    ----------
    rank : int
        The other rank: the reader or the owner of the rows.
    outputs : (int, int)
        Rows of the reader's output, counted from its first, with windows that read these rows.
    rows : (int, int)
        Rows of the map.
    geometry : ConvGeometry
        The convolution of these rows alone, with zeros in place of all others.
    """

    rank: int
    outputs: Range
    rows: Range
    geometry: ConvGeometry


class StripedConv2d(HaloConv2d):
    """Convolution of a stripe, with the same parameters and fusion as `FusedConv2d`.

    The convolution of the whole stripe, with zeros in place of the halo, runs while the halo
    travels; the first and last rows of its output are then computed again. In backward, the rows of
    dy at the edges travel to the rank that owns the halo, which computes its part of dx and dw, so
    that no halo is kept.

    Parameters
    ----------
    conv : Conv2d
        This rank's convolution with zeros in place of the halo, not bound yet.
    window : ConvGeometry
        The convolution of the whole map.
    halo : Halo
    outputs : sequence of (int, int)
        Each rank's rows of the output.
    """

    def __init__(
        self, conv: Conv2d, window: ConvGeometry, halo: Halo, outputs: Sequence[Range]
    ) -> None:
        super().__init__(conv, halo)
        self.window, self.outputs = window, outputs

    def build(self, *shapes: Shape) -> Shape:
        """Declare parameters, and find the rows at the edges."""
        shape = super().build(*shapes)
        find = _Finder(self.window, self.geometry, self.halo)
        self.edges = find.edges(self.outputs[self.halo.place])
        self.reads = tuple(
            find.link(r, rows, self.outputs[self.halo.place]) for r, rows in self.halo.receives
        )
        self.serves = tuple(find.link(r, rows, self.outputs[r]) for r, rows in self.halo.sends)
        return shape

    def forward_steps(self, *xs: Array | Deferred, context: StepContext, joint: bool) -> Steps:
        """Convolve the stripe while the halo travels, then the rows at the edges."""
        (x,), halo = xs, self.halo
        pending: Pending = yield halo.messages(self.halo_sends(x), halo.receives, x, self.backend)
        y, saved = FusedConv2d.forward(self, x, context=context)
        received = dict(zip((rows for _, rows in halo.receives), pending.wait(), strict=True))
        for edge in self.edges:
            self._finish_rows(x, y, edge, join(halo, received, edge.halo), context)
        return y, saved

    def _finish_rows(
        self,
        x: Array | Deferred,
        y: Array | Deferred,
        edge: Edge,
        halo: Array,
        context: StepContext,
    ) -> None:
        """Compute the rows of an edge, and correct the sums of the following norm."""
        own = rows_of(self, x, self.halo.rows(edge.own, self.halo.own[0]))
        above = edge.halo[0] < edge.own[0]
        slab = self.xp.concatenate((halo, own) if above else (own, halo), axis=self.halo.dim)
        w, b = self._folded() if self.folds(context) else (self.w.value, self._bias())
        shape = list(self.output_shape)
        shape[self.halo.cut.dim] = edge.outputs[1] - edge.outputs[0]
        rows = self.empty(len(slab), tuple(shape))
        self.backend.conv.forward(slab, w, b, edge.geometry, out=rows, relu=self.relu)
        place = self.halo.rows(edge.outputs, 0)
        sums = y.sums if isinstance(y, Deferred) else None
        array = self.array(y)
        if sums is not None:
            sums += self._statistics(rows) - self._statistics(array[place].copy())
        array[place] = rows

    def _statistics(self, rows: Array) -> Array:
        sums = self.backend.empty((1 + 2 * self.filters,), "float64")
        self.backend.norm.statistics(rows, out=sums)
        return sums

    def gated_steps(
        self, dy: Array | Deferred, saved: Saved, so_far: Array | None, gate: Deferred | None
    ) -> Steps:
        """Compute the gradients of the stripe while the rows of dy at the edges travel."""
        (x, *y), halo, conv, w = saved, self.halo, self.backend.conv, self.w
        dy = self._backward_bias(dy, *y)
        pending: Pending = yield Messages(
            [(rows_of(self, dy, halo.rows(link.outputs, 0)), link.rank) for link in self.reads],
            [(self._edge_of(dy, link), link.rank) for link in self.serves],
            halo.cut.axis,
        )
        dx = self._backward_products(x, dy, so_far, gate)
        for link, edge in zip(self.serves, pending.wait(), strict=True):
            place = halo.rows(link.rows, halo.own[0])
            rows = rows_of(self, x, place)
            if not w.frozen:
                conv.backward_filter(rows, edge, link.geometry, out=w.grad, accumulate=True)
            if self.needs_dx:
                part = self.backend.empty(rows.shape, rows.dtype)
                conv.backward_data(edge, w.value, link.geometry, out=part)
                self._add_rows(dx, part, place, gate)
        return dx

    def _add_rows(
        self, dx: Array | Deferred, part: Array, place: Index, gate: Deferred | None
    ) -> None:
        """Add a part to rows of dx, and if dx is gated, the gated part and its sums."""
        if gate is not None and isinstance(dx, Deferred):
            sums = self.backend.empty(dx.sums.shape, "float64")
            self.backend.fused.gate(part, deferred_rows(gate, place), out=part, sums=sums)
            dx.sums += sums
        self.array(dx)[place] += part

    def _edge_of(self, dy: Array | Deferred, link: Link) -> Array:
        """Return memory for rows of another rank's dy."""
        shape = list(dy.shape)
        shape[self.halo.dim] = link.outputs[1] - link.outputs[0]
        return self.backend.empty(tuple(shape), dy.dtype)

    def cost(self, batch: int) -> Cost:
        """The stripe, the edges, and what this rank computes for the halos of others.

        Rows that are sent are copied. The rows of an edge are put together, convolved and copied
        into the output; the part of a halo is added to dx.
        """
        cost, itemsize = super().cost(batch), self.dtype.itemsize
        line = batch * prod(self.input_shapes[0]) // self.input_shapes[0][self.halo.cut.dim]
        out = batch * prod(self.output_shape) // self.output_shape[self.halo.cut.dim]
        sent = sum(rows[1] - rows[0] for _, rows in self.halo.sends)
        returned = sum(link.outputs[1] - link.outputs[0] for link in self.reads)
        slabs = sum(edge.geometry.size[self.halo.cut.dim] for edge in self.edges)
        rows = sum(edge.outputs[1] - edge.outputs[0] for edge in self.edges)
        own = sum(link.rows[1] - link.rows[0] for link in self.serves)
        given = sum(link.outputs[1] - link.outputs[0] for link in self.serves)
        dw, dx = not self.w.frozen, self.needs_dx
        back = sum(link.geometry.flops(batch) for link in self.serves) * (dw + dx)
        forward = line * (2 * sent + 3 * slabs) + out * 3 * rows
        backward = line * own * (2 + dw + 4 * dx) + out * (2 * returned + given * (dw + dx))
        return cost + Cost(
            sum(edge.geometry.flops(batch) for edge in self.edges),
            back + line * own * dx,
            forward * itemsize,
            backward * itemsize,
        )


def stripe_padding(window: ConvGeometry, halo: Halo, outputs: Range) -> tuple[int, int] | None:
    """Return the padding that stands in for the halo, or None if the stripe alone does not suffice.

    It does not if windows of this rank's rows read no own row, begin after the first own one, end
    so early that there would be more rows, or read the halo on both sides. It is not efficient if
    many rows are computed twice (`EDGE_SHARE`).

    Parameters
    ----------
    window : ConvGeometry
        The convolution of the whole map.
    halo : Halo
    outputs : (int, int)
        This rank's rows of the output.
    """
    dim, (start, stop) = halo.cut.dim, halo.own
    find = _Finder(window, window, halo)
    first, last = find.reads(outputs)
    before, after = start - first, max(last - stop, 0)
    if before < 0 or stop - last >= window.stride[dim] or max(before, after) >= find.extent:
        return None
    top, bottom = find.middle(outputs)
    at_edges = top - outputs[0] + outputs[1] - bottom
    few = EDGE_SHARE * at_edges <= outputs[1] - outputs[0]
    return (before, after) if few and top <= bottom else None


class _Finder:
    """Finds the rows at the edges of stripes, and their convolutions.

    Parameters
    ----------
    window, local : ConvGeometry
        The convolution of the whole map, and of this rank's stripe.
    halo : Halo
    """

    def __init__(self, window: ConvGeometry, local: ConvGeometry, halo: Halo) -> None:
        self.local, self.halo, dim = local, halo, halo.cut.dim
        self.dim, self.size = dim, window.size[dim]
        self.stride, self.before = window.stride[dim], window.padding[dim][0]
        self.extent = (window.kernel[dim] - 1) * window.dilation[dim] + 1

    def reads(self, outputs: Range) -> Range:
        """Return the rows that windows read, padding included."""
        first = outputs[0] * self.stride - self.before
        return first, (outputs[1] - 1) * self.stride - self.before + self.extent

    def _inside(self, row: int) -> Range:
        first, last = self.reads((row, row + 1))
        return max(first, 0), min(last, self.size)

    def middle(self, outputs: Range) -> Range:
        """Return the first row of the output that reads no row above, and the first below."""
        rows, (start, stop) = range(*outputs), self.halo.own
        top = next((row for row in rows if self._inside(row)[0] >= start), outputs[1])
        bottom = next((row for row in rows if self._inside(row)[1] > stop), outputs[1])
        return top, bottom

    def edges(self, outputs: Range) -> tuple[Edge, ...]:
        """Return the edges of this rank's stripe."""
        top, bottom = self.middle(outputs)
        sides = [(outputs[0], top), (bottom, outputs[1])]
        return tuple(self._edge(outputs, rows) for rows in sides if rows[0] < rows[1])

    def _edge(self, outputs: Range, rows: Range) -> Edge:
        start, stop = self.halo.own
        first, last = self.reads(rows)
        read = max(first, 0), min(last, self.size)
        above = read[0] < start
        return Edge(
            (rows[0] - outputs[0], rows[1] - outputs[0]),
            (read[0], start) if above else (stop, read[1]),
            (start, read[1]) if above else (read[0], stop),
            self._geometry(read, (first, last)),
        )

    def link(self, rank: int, rows: Range, outputs: Range) -> Link:
        """Return the link for rows that windows of a reader's outputs read."""
        reading = [
            row
            for row in range(*outputs)
            if self._inside(row)[0] < rows[1] and rows[0] < self._inside(row)[1]
        ]
        span = reading[0], reading[-1] + 1
        local = span[0] - outputs[0], span[1] - outputs[0]
        return Link(rank, local, rows, self._geometry(rows, self.reads(span)))

    def _geometry(self, rows: Range, read: Range) -> ConvGeometry:
        """Return the convolution of rows with zeros in place of all others that windows read."""
        padding = rows[0] - read[0], read[1] - rows[1]
        return with_rows(self.local, self.dim, rows[1] - rows[0], padding)
