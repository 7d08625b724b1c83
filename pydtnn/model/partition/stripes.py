"""Rows of stripes: the exchange before a layer with windows, such as a convolution.

A map is cut into stripes along its height or width. The windows of a rank's part of the output
reach into the stripes of its neighbours; these rows are the halo. In backward, the gradient of a
halo is returned to the rank that owns the rows, which adds it to its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pydtnn.kernels import Backend, Deferred, Term
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext
from pydtnn.layers.collectives import Messages, Pending, Steps
from pydtnn.layers.communicating import OnlyCommunicating
from pydtnn.layers.cost import Cost
from pydtnn.layers.parameters import Cut

Range = tuple[int, int]
"""First row and the row after the last."""

Index = tuple[slice, ...]
"""Index of rows of an array."""


class Halo:
    """The rows that ranks along an axis need besides their own.

    Parameters
    ----------
    cut : Cut
        The rows that each rank has; `dim` is the axis of a sample.
    needed : sequence of (int, int)
        The rows that each rank needs.
    place : int
        This rank's position along the axis.
    """

    def __init__(self, cut: Cut, needed: Sequence[Range], place: int) -> None:
        self.cut, self.place = cut, place
        self.dim = cut.dim + 1
        self._needed = needed
        owned = list(pairwise(cut.bounds))
        self.own, self.needed = owned[place], needed[place]
        others = [r for r in range(len(owned)) if r != place]
        self.kept = _common(self.own, self.needed)
        self.sends = [(r, rows) for r in others if (rows := _common(self.own, needed[r]))]
        self.receives = [(r, rows) for r in others if (rows := _common(owned[r], self.needed))]

    def rows(self, rows: Range, first: int) -> Index:
        """Return the index of rows of an array that begins with row `first`."""
        return (*(slice(None),) * self.dim, slice(rows[0] - first, rows[1] - first))

    def _empty(self, x: Any, rows: Range, backend: Backend) -> Array:
        shape = (*x.shape[: self.dim], rows[1] - rows[0], *x.shape[self.dim + 1 :])
        return backend.empty(shape, x.dtype)

    def places(self, like: Any, backend: Backend) -> list[tuple[Array, int]]:
        """Return new arrays for the rows of other ranks, and these ranks."""
        return [(self._empty(like, rows, backend), r) for r, rows in self.receives]

    def fetch(self, x: Array, backend: Backend) -> Messages:
        """Return the messages of forward: own rows to the ranks that need them."""
        sends = [(x[self.rows(rows, self.own[0])], r) for r, rows in self.sends]
        return Messages(sends, self.places(x, backend), self.cut.axis)

    def give_back(self, dy: Array, backend: Backend) -> Messages:
        """Return the messages of backward: gradients of received rows to their owners."""
        sends = [(dy[self.rows(rows, self.needed[0])], r) for r, rows in self.receives]
        receives = [(self._empty(dy, rows, backend), r) for r, rows in self.sends]
        return Messages(sends, receives, self.cut.axis)


def rows_of(layer: Layer, x: Array | Deferred, index: Index) -> Array:
    """Return a copy of rows of an array; those of a deferred one are computed."""
    if not isinstance(x, Deferred):
        return x[index].copy()
    if x.array is not None:
        return x.array[index].copy()
    terms = [Term(term.x[index].copy(), term.pivot, term.factor) for term in x.terms]
    return layer.array(x.of_terms(*terms, shift=x.shift))


class HaloExchange(OnlyCommunicating, Layer):
    """Extend a stripe by the rows that the next layer's windows need.

    Parameters
    ----------
    cut : Cut
        The rows that each rank has; `dim` is the axis of a sample.
    needed : sequence of (int, int)
        The rows that each rank needs. Own rows that are not needed are left out.
    position : mapping of str to int
        This rank's position in the mesh.

    Attributes
    ----------
    changes : bool
        Whether any rank needs other rows than its own.

    Notes
    -----
    Input and output have the shapes of this rank's parts.
    """

    saves = ()
    new_results = RESULTS
    supports = ("16 bits",)

    def __init__(
        self,
        cut: Cut,
        needed: Sequence[Range],
        *,
        position: Mapping[str, int],
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.halo = Halo(cut, needed, position[cut.axis])
        self.changes = list(pairwise(cut.bounds)) != [*needed]

    def build(self, *shapes: Shape) -> Shape:
        """Return the shape with the halo."""
        shape = list(self.single(shapes))
        shape[self.halo.cut.dim] = self.halo.needed[1] - self.halo.needed[0]
        return tuple(shape)

    def forward_steps(self, *xs: Array, context: StepContext, joint: bool) -> Steps:
        """Send rows to the ranks that need them, and put received ones next to the own."""
        (x,), halo = xs, self.halo
        pending: Pending = yield halo.fetch(x, self.backend)
        y, first = self.empty(len(x), self.output_shape), halo.needed[0]
        if halo.kept:
            y[halo.rows(halo.kept, first)] = x[halo.rows(halo.kept, halo.own[0])]
        for (_, rows), received in zip(halo.receives, pending.wait(), strict=True):
            y[halo.rows(rows, first)] = received
        return y, None

    def backward_steps(self, dy: Array, saved: Saved, *, joint: bool) -> Steps:
        """Return the gradients of received rows; add those of own rows in the order of ranks."""
        if not self.needs_dx:
            return None
        halo = self.halo
        pending: Pending = yield halo.give_back(dy, self.backend)
        dx, first = self.backend.zeros((len(dy), *self.input_shapes[0]), dy.dtype), halo.own[0]
        if halo.kept:
            dx[halo.rows(halo.kept, first)] = dy[halo.rows(halo.kept, halo.needed[0])]
        for (_, rows), received in zip(halo.sends, pending.wait(), strict=True):
            dx[halo.rows(rows, first)] += received
        return dx

    def cost(self, batch: int) -> Cost:
        """Copies of rows that are kept, sent and received; additions of those given back."""
        halo, (inputs, _) = self.halo, self.elements(batch)
        row, itemsize = inputs // (halo.own[1] - halo.own[0]), self.dtype.itemsize
        kept = 0 if halo.kept is None else halo.kept[1] - halo.kept[0]
        sent = row * sum(stop - start for _, (start, stop) in halo.sends)
        received = row * sum(stop - start for _, (start, stop) in halo.receives)
        return Cost(
            0,
            sent,
            2 * (sent + row * kept + received) * itemsize,
            (inputs + 2 * (received + row * kept) + 3 * sent) * itemsize,
        )


def _common(a: Range, b: Range) -> Range | None:
    """Return the rows in both ranges; None if there are none.

    >>> _common((0, 4), (3, 6)), _common((0, 4), (4, 6))
    ((3, 4), None)
    """
    first, last = max(a[0], b[0]), min(a[1], b[1])
    return (first, last) if first < last else None


def window_rows(
    outputs: Range, size: int, kernel: int, stride: int, dilation: int, before: int
) -> tuple[Range, tuple[int, int]]:
    """Return the rows of the input that rows of the output read, and the padding around them.

    Parameters
    ----------
    outputs : (int, int)
    size, kernel, stride, dilation, before : int
        Height of the whole map; options of the window along this axis, and its padding before.

    >>> window_rows((0, 4), 8, 3, 1, 1, 1), window_rows((2, 4), 8, 3, 2, 1, 1)
    (((0, 5), (1, 0)), ((3, 8), (0, 0)))
    """
    first = outputs[0] * stride - before
    last = (outputs[1] - 1) * stride - before + (kernel - 1) * dilation + 1
    start, stop = max(first, 0), min(last, size)
    return (start, stop), (start - first, last - stop)
