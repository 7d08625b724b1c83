"""Convolution of a stripe of a map, which exchanges halos while it computes the interior."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from pydtnn.kernels import ConvGeometry, Deferred, Term
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Cost, Saved, Shape, StepContext
from pydtnn.layers.collectives import Pending, Steps
from pydtnn.layers.communicating import Communicating
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.stripes import Halo, Range, window_rows


class Edge(NamedTuple):
    """Rows of the output, at one end of a stripe, with windows that reach into the halo.

    Attributes
    ----------
    outputs : (int, int)
        Rows of this rank's output.
    halo, own : (int, int)
        Rows of the map that these windows read: of other stripes, and of this one.
    whole : ConvGeometry
        The convolution of all rows that they read.
    outside : ConvGeometry
        The convolution of the halo alone, with zeros in place of own rows.
    """

    outputs: Range
    halo: Range
    own: Range
    whole: ConvGeometry
    outside: ConvGeometry


class StripedConv2d(Communicating, FusedConv2d):
    """Convolution of a stripe, with the same parameters and fusion as `FusedConv2d`.

    The convolution of the whole stripe, with zeros in place of the halo, runs while the halo
    travels; the first and last rows of its output are then computed again. In backward, the
    gradient of the halo is computed first and travels while that of the stripe is computed.

    Parameters
    ----------
    conv : Conv2d
        This rank's convolution with zeros in place of the halo, not bound yet.
    window : ConvGeometry
        The convolution of the whole map.
    halo : Halo
    outputs : (int, int)
        This rank's rows of the output.
    """

    def __init__(self, conv: Conv2d, window: ConvGeometry, halo: Halo, outputs: Range) -> None:
        super().__init__(conv)
        self.window, self.halo, self.outputs = window, halo, outputs

    def build(self, *shapes: Shape) -> Shape:
        """Declare parameters, and find the rows at the edges."""
        shape = super().build(*shapes)
        self.edges = find_edges(self.window, self.geometry, self.halo, self.outputs)
        return shape

    def forward_steps(self, *xs: Array | Deferred, context: StepContext, joint: bool) -> Steps:
        """Convolve the stripe while the halo travels, then the rows at the edges."""
        (x,), halo = xs, self.halo
        sends = [(self._rows(x, rows, halo.own[0]), r) for r, rows in halo.sends]
        pending: Pending = yield halo.messages(sends, halo.receives, x, self.backend)
        y, saved = FusedConv2d.forward(self, x, context=context)
        received = dict(zip((rows for _, rows in halo.receives), pending.wait(), strict=True))
        outside = tuple(self._join(received, edge.halo) for edge in self.edges)
        for edge, rows in zip(self.edges, outside, strict=True):
            self._finish_rows(x, y, edge, rows, context)
        return y, (saved, outside)

    def _finish_rows(
        self,
        x: Array | Deferred,
        y: Array | Deferred,
        edge: Edge,
        halo: Array,
        context: StepContext,
    ) -> None:
        """Compute the rows of an edge, and correct the sums of the following norm."""
        own = self._rows(x, edge.own, self.halo.own[0])
        above = edge.halo[0] < edge.own[0]
        slab = self.xp.concatenate((halo, own) if above else (own, halo), axis=self.halo.dim)
        w, b = self._folded() if self.folds(context) else (self.w.value, self._bias())
        shape = list(self.output_shape)
        shape[self.halo.cut.dim] = edge.outputs[1] - edge.outputs[0]
        rows = self.empty(len(slab), tuple(shape))
        self.backend.conv.forward(slab, w, b, edge.whole, out=rows, relu=self.relu)
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

    def backward_steps(self, dy: Array | Deferred, saved: Saved, *, joint: bool) -> Steps:
        """Compute the gradient of the halo, which travels while that of the stripe is computed."""
        (x, *y), outside = saved
        halo, conv, w = self.halo, self.backend.conv, self.w
        dy = self._backward_bias(dy, *y)
        edges = [
            (e, h, self._rows(dy, e.outputs, 0)) for e, h in zip(self.edges, outside, strict=True)
        ]
        pending: Pending | None = None
        if self.needs_dx:
            gradients: dict[Range, Array] = {}
            for edge, rows, dy_rows in edges:
                gradients[edge.halo] = self.backend.empty(rows.shape, rows.dtype)
                conv.backward_data(dy_rows, w.value, edge.outside, out=gradients[edge.halo])
            sends = [(self._of(gradients, rows), r) for r, rows in halo.receives]
            pending = yield halo.messages(sends, halo.sends, x, self.backend)
        dx = self._backward_products(x, dy, None, None)
        if not w.frozen:
            for edge, rows, dy_rows in edges:
                conv.backward_filter(rows, dy_rows, edge.outside, out=w.grad, accumulate=True)
        if pending is not None:
            for (_, rows), received in zip(halo.sends, pending.wait(), strict=True):
                dx[halo.rows(rows, halo.own[0])] += received
        return dx

    def _rows(self, x: Array | Deferred, rows: Range, first: int) -> Array:
        """Return a copy of rows of an array that begins with row `first`."""
        index = self.halo.rows(rows, first)
        if not isinstance(x, Deferred):
            return x[index].copy()
        if x.array is not None:
            return x.array[index].copy()
        terms = [Term(term.x[index].copy(), term.pivot, term.factor) for term in x.terms]
        return self.array(Deferred(*terms, shift=x.shift, relu=x.relu))

    def _join(self, received: dict[Range, Array], rows: Range) -> Array:
        """Return the rows of one side of the halo, which may be from several ranks."""
        parts = [array for own, array in sorted(received.items()) if _within(own, rows)]
        return parts[0] if len(parts) == 1 else self.xp.concatenate(parts, axis=self.halo.dim)

    def _of(self, gradients: dict[Range, Array], rows: Range) -> Array:
        """Return the gradient of rows of one side of the halo."""
        side = next(own for own in gradients if _within(rows, own))
        return gradients[side][self.halo.rows(rows, side[0])]

    def cost(self, batch: int) -> Cost:
        """The operations of the stripe and its edges."""
        cost = super().cost(batch)
        flops = sum(edge.whole.flops(batch) for edge in self.edges)
        back = sum(edge.outside.flops(batch) for edge in self.edges) * (1 + self.needs_dx)
        rows = sum(prod(edge.whole.size) for edge in self.edges) * self.geometry.channels
        moved = batch * rows * self.dtype.itemsize
        return Cost(
            cost.flops_forward + flops,
            cost.flops_backward + back,
            cost.bytes_forward + moved,
            cost.bytes_backward + moved,
        )


def _within(rows: Range, other: Range) -> bool:
    return other[0] <= rows[0] and rows[1] <= other[1]


def stripe_padding(window: ConvGeometry, halo: Halo, outputs: Range) -> tuple[int, int] | None:
    """Return the padding that stands in for the halo, or None if the stripe alone does not suffice.

    It does not if windows of this rank's rows read no own row, begin after the first own one or end
    so early that there would be more rows.

    Parameters
    ----------
    window : ConvGeometry
        The convolution of the whole map.
    halo : Halo
    outputs : (int, int)
        This rank's rows of the output.
    """
    dim, (start, stop) = halo.cut.dim, halo.own
    k, s, d = window.kernel[dim], window.stride[dim], window.dilation[dim]
    extent = (k - 1) * d + 1
    first = outputs[0] * s - window.padding[dim][0]
    last = (outputs[1] - 1) * s - window.padding[dim][0] + extent
    before, after = start - first, max(last - stop, 0)
    if before < 0 or stop - last >= s or max(before, after) >= extent:
        return None
    top, bottom = _edges(window, halo, outputs)
    return None if top > bottom else (before, after)


def _edges(window: ConvGeometry, halo: Halo, outputs: Range) -> Range:
    """Return the first row of the output that reads no row above, and the first that does below."""
    dim, (start, stop) = halo.cut.dim, halo.own
    k, s, d = window.kernel[dim], window.stride[dim], window.dilation[dim]
    first, last = outputs
    needed = halo.needed

    def reads(row: int) -> Range:
        begin = row * s - window.padding[dim][0]
        return max(begin, needed[0]), min(begin + (k - 1) * d + 1, needed[1])

    top = next((row for row in range(first, last) if reads(row)[0] >= start), last)
    bottom = next((row for row in range(first, last) if reads(row)[1] > stop), last)
    return top, bottom


def find_edges(
    window: ConvGeometry, local: ConvGeometry, halo: Halo, outputs: Range
) -> tuple[Edge, ...]:
    """Return the edges of a stripe for which `stripe_padding` is not None.

    Parameters
    ----------
    window, local : ConvGeometry
        The convolution of the whole map, and that of the stripe with zeros in place of the halo.
    halo : Halo
    outputs : (int, int)
        This rank's rows of the output.
    """
    top, bottom = _edges(window, halo, outputs)
    sides = [(outputs[0], top), (bottom, outputs[1])]
    return tuple(_edge(window, local, halo, outputs, rows) for rows in sides if rows[0] < rows[1])


def _edge(
    window: ConvGeometry, local: ConvGeometry, halo: Halo, outputs: Range, rows: Range
) -> Edge:
    dim, (start, stop) = halo.cut.dim, halo.own
    read, around = window_rows(
        rows,
        window.size[dim],
        window.kernel[dim],
        window.stride[dim],
        window.dilation[dim],
        window.padding[dim][0],
    )
    above = read[0] < start
    outside = (read[0], start) if above else (stop, read[1])
    own = (start, read[1]) if above else (read[0], stop)
    inside = own[1] - own[0]
    zeros = (around[0], around[1] + inside) if above else (around[0] + inside, around[1])
    return Edge(
        (rows[0] - outputs[0], rows[1] - outputs[0]),
        outside,
        own,
        _with_rows(local, dim, read[1] - read[0], around),
        _with_rows(local, dim, outside[1] - outside[0], zeros),
    )


def _with_rows(local: ConvGeometry, dim: int, size: int, padding: Range) -> ConvGeometry:
    """Return a convolution with another number of rows and another padding around them."""
    sizes, paddings = list(local.size), list(local.padding)
    sizes[dim], paddings[dim] = size, padding
    return ConvGeometry.shared(
        tuple(sizes),
        local.kernel,
        local.stride,
        tuple(paddings),
        local.dilation,
        local.channels,
        local.filters,
        local.groups,
    )
