"""Convolution of a stripe of a map, which exchanges halos while it computes the interior."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from pydtnn.kernels import ConvGeometry, Deferred
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Saved, Shape, StepContext
from pydtnn.layers.collectives import Messages, Pending, Steps
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.cost import Cost
from pydtnn.layers.extended_conv import HaloConv2d, with_rows
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.stripes import Halo, Index, Range, deferred_rows, join, rows_of

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
