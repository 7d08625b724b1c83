"""Exchange layers: between two layers of a partitioned network with different layouts.

Along each axis of the mesh, an array is whole on every rank, cut along one of its axes, or partial:
the array of the network is the sum over the ranks. A gradient has the layout of the array, except
that a rank's layers may return a partial gradient for a whole array. With P ranks and arrays of n
elements per step, a rank sends

    from -> to            forward                      backward
    whole -> cut          nothing: takes its part      all-gather: (P - 1) n / P
    cut -> whole          all-gather: (P - 1) n / P    nothing: takes its part
    cut -> cut            (P - 1) n / P^2              (P - 1) n / P^2; less along the same axis
    partial -> whole      all-reduce: 2 (P - 1) n / P  nothing
    partial -> cut        reduce-scatter: (P - 1) n / P  all-gather: (P - 1) n / P

and if the gradient for a whole array is partial, backward sums it: 2 (P - 1) n / P if the array was
whole or partial before, reduce-scatter, (P - 1) n / P, if it was cut. A sequence that was cut by
positions is gathered once more, (P - 1) n / P, for layers that would keep all of it for backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Layer, Saved, Shape, StepContext
from pydtnn.layers.collectives import (
    AllGather,
    AllReduce,
    Redistribute,
    ReduceScatter,
    Steps,
    parts_of,
)
from pydtnn.layers.communicating import OnlyCommunicating
from pydtnn.layers.cost import Cost
from pydtnn.layers.parameters import Cut
from pydtnn.layers.recomputed import (
    Recomputed,
    Recomputing,
    Regathered,
    kept,
    restored,
)
from pydtnn.utils.split import even_cuts

SAMPLES = -1
"""Axis of a cut between samples; 0 is the first axis of a sample."""


class Spread(Enum):
    """How an array that is not cut is spread over the ranks along an axis of the mesh.

    As the layout that a layer requires, PARTIAL is a whole array for which it returns a partial
    gradient.
    """

    WHOLE = "whole"
    PARTIAL = "partial"


State = Cut | Spread
"""Layout of an array along one axis of the mesh."""


def describe_state(state: State, axes: int) -> str:
    """Return the layout, along one axis of the mesh, of samples with this number of axes.

    >>> describe_state(Cut(0, "model", (0, 2, 4)), 3), describe_state(Cut(0, "model", (0, 2, 4)), 1)
    ('rows', 'channels')
    """
    if not isinstance(state, Cut):
        return state.value
    if state.blocks > 1:
        return "heads"
    names = {SAMPLES: "samples", 0: "rows", 1: "columns", axes - 1: "channels"}
    return names.get(state.dim, f"axis {state.dim}")


class Exchange(OnlyCommunicating, Recomputing, Layer):
    """Change the layout of an array along one axis of the mesh.

    Parameters
    ----------
    axis : str
    before, after : Cut or Spread
        The layout of the input, and the one that the following layers require. The axes of cuts are
        those of a sample; `SAMPLES` cuts the batch, evenly. Of two cuts, one may be of blocks, of a
        later axis than the other.
    position : mapping of str to int
        This rank's position in the mesh.
    ranks : int
        Ranks along the axis.

    Attributes
    ----------
    optional : bool
        Whether this gathers an output of the model, which may remain cut by channels, or a sequence
        by positions (`StepContext.cut_outputs`).

    Notes
    -----
    Input and output have the shapes of this rank's parts.
    """

    saves: tuple[str, ...] = ()
    supports: tuple[str, ...] = ("16 bits",)
    optional = False

    def __init__(
        self,
        axis: str,
        before: State,
        after: State,
        *,
        position: Mapping[str, int],
        ranks: int,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.axis, self.before, self.after = axis, before, after
        self.place, self.ranks = position[axis], ranks
        same = before is Spread.WHOLE and after is Spread.PARTIAL
        passes = before is Spread.PARTIAL and after is Spread.WHOLE
        views = {"output": same, "gradient": passes}
        self.views = tuple(result for result, is_view in views.items() if is_view)
        self.new_results = tuple(result for result, is_view in views.items() if not is_view)
        over_input = before is Spread.PARTIAL and not isinstance(after, Cut)
        over_dy = after is Spread.PARTIAL and not isinstance(before, Cut)
        self.may_overwrite = (*["input"] * over_input, *["dy"] * over_dy)

    def build(self, *shapes: Shape) -> Shape:
        """Return the shape of this rank's part."""
        shape = list(self.single(shapes))
        if isinstance(self.before, Cut) and not isinstance(self.after, Cut):
            is_sequence = self.before.dim == 0 and len(shape) == 2
            self.supports = (*self.supports, *["recomputed", "recomputing"] * is_sequence)
        if isinstance(self.before, Cut) and self.before.dim != SAMPLES:
            shape[self.before.dim] = self.before.length
        if isinstance(self.after, Cut) and self.after.dim != SAMPLES:
            shape[self.after.dim] = self.after.size({self.axis: self.place})
        return tuple(shape)

    def forward_steps(self, *xs: Array, context: StepContext, joint: bool) -> Steps:
        """Change the layout of the array."""
        (x,) = xs
        if self.optional and context.cut_outputs:
            return x, None
        again, x = kept(x), self.array(x)
        total = len(x)
        if isinstance(self.before, Cut) and self.before.dim == SAMPLES:
            total = context.batch
        y = yield from self._forward(x, total)
        if not (self.recomputed and context.differentiable):
            return y, total

        def gather() -> Steps:
            return (yield from self._forward(restored(again), total))

        return Recomputed(y, Regathered(gather)), total

    def _forward(self, x: Array, total: int) -> Steps:
        y = yield from self._change(x, self.before, self.after, total, self.overwrites_input)
        return y.reshape(len(y), *self.output_shape)

    def backward_steps(self, dy: Array, saved: Saved, *, joint: bool) -> Steps:
        """Change the layout of the gradient back."""
        if not self.needs_dx:
            return None
        if saved is None:  # the output remained cut
            return dy
        before: State = Spread.PARTIAL if self.after is Spread.PARTIAL else self.after
        after = Spread.WHOLE if self.before is Spread.PARTIAL else self.before
        dx = yield from self._change(dy, before, after, saved, self.overwrites_dy)
        return dx.reshape(len(dx), *self.input_shapes[0])

    def _change(
        self, x: Array, before: State, after: State, total: int, may_overwrite: bool
    ) -> Any:
        """Change a layout, as a generator; a whole array becomes partial without any change."""
        for state in (before, after):
            if isinstance(state, Cut) and state.blocks > 1:
                *outer, whole = x.shape[: state.dim + 2]  # not -1: there may be no samples
                inner = x.shape[state.dim + 2 :]
                x = x.reshape(*outer, state.blocks, whole // state.blocks, *inner)
        if isinstance(before, Cut) and isinstance(after, Cut):
            source, target = self._cut(before, total), self._cut(after, total)
            pending = yield Redistribute(x, self.axis, source=source, target=target)
        elif isinstance(before, Cut):
            dim, bounds = self._cut(before, total)
            pending = yield AllGather(x, self.axis, dim=dim, bounds=bounds)
        elif isinstance(after, Cut):
            dim, bounds = self._cut(after, total)
            if before is Spread.WHOLE:
                return x[parts_of(bounds, dim)[self.place]].copy()
            pending = yield ReduceScatter(x, self.axis, dim=dim, bounds=bounds)
        elif before is Spread.PARTIAL:
            pending = yield AllReduce(x if may_overwrite else x.copy(), self.axis)
        else:
            return x
        return pending.wait()

    def _cut(self, cut: Cut, total: int) -> tuple[int, tuple[int, ...]]:
        """Return the axis of the array, and the bounds, of a cut."""
        if cut.dim == SAMPLES:
            return 0, tuple(even_cuts(total, self.ranks))
        return cut.dim + 1 + (cut.blocks > 1), cut.bounds

    def cost(self, batch: int) -> Cost:
        """The copies of this rank, and the additions to its part."""
        before: State = Spread.PARTIAL if self.after is Spread.PARTIAL else self.after
        after = Spread.WHOLE if self.before is Spread.PARTIAL else self.before
        elements, itemsize = self.elements(batch), self.dtype.itemsize
        forward = self._work(self.before, self.after, elements, self.overwrites_input)
        backward = self._work(before, after, elements[::-1], self.overwrites_dy)
        return Cost(forward[0], backward[0], forward[1] * itemsize, backward[1] * itemsize)

    def _work(
        self, before: State, after: State, elements: tuple[int, int], may_overwrite: bool
    ) -> tuple[int, int]:
        """Return the additions of a change, and the elements that it reads and writes."""
        source, target = elements
        if isinstance(before, Cut):
            return 0, source + target if isinstance(after, Cut) else 2 * target
        if isinstance(after, Cut):
            if before is Spread.WHOLE:
                return 0, 2 * target
            added = (self.ranks - 1) * target
            return added, 2 * source + 3 * added
        if before is Spread.PARTIAL and after is Spread.WHOLE:
            return 0, 2 * source * (not may_overwrite)
        return 0, 0
