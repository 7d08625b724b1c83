"""Layers of several inputs."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Layer, Saved, Shape, StepContext
from pydtnn.layers.cost import Cost


class Add(Layer):
    """Sum of two or more inputs of equal shape."""

    saves = ()
    may_overwrite_input = new_output = takes_16_bits = True
    views = ("gradient",)

    def build(self, *shapes: Shape) -> Shape:
        """Check that the shapes are equal."""
        if len(shapes) < 2 or len(set(shapes)) != 1:
            given = " and ".join(map(str, shapes))
            raise self.fail(
                f"inputs must be two or more of equal shape, got {given}; "
                "add a convolution with the same stride and filters to the shorter path"
            )
        return shapes[0]

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Add from left to right."""
        first, second, *rest = xs
        y = self.output_like(first)
        self.backend.elementwise.add(first, second, out=y)
        for x in rest:
            self.backend.elementwise.add(y, x, out=y)
        return y, None

    def backward(self, dy: Array, saved: Saved) -> tuple[Array, ...]:
        """Every input's gradient is dy."""
        return (dy,) * len(self.input_shapes)

    def cost(self, batch: int) -> Cost:
        """An addition, of three sweeps, for each input but one; backward passes dy on."""
        _, outputs = self.elements(batch)
        added = (len(self.input_shapes) - 1) * outputs
        return Cost(added, 0, 3 * added * self.dtype.itemsize, 0)


class Concat(Layer):
    """Inputs side by side along one axis.

    Parameters
    ----------
    axis : int
        Axis of a sample: 0 is the first after the batch; by default the channels.
    """

    saves = ()
    new_output = new_gradient = takes_16_bits = True

    def __init__(self, axis: int = -1, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.axis = axis

    def build(self, *shapes: Shape) -> Shape:
        """Check that all other axes are equal, and compute the offset of each input."""
        axes = len(shapes[0])
        if not -axes <= self.axis < axes:
            raise self.fail(f"axis must exist in an input of shape {shapes[0]}, got {self.axis}")
        axis = self.axis % axes
        others = {(*s[:axis], *s[axis + 1 :]) for s in shapes}
        if len(others) != 1 or any(len(s) != axes for s in shapes):
            given = " and ".join(map(str, shapes))
            raise self.fail(f"inputs must have equal shapes except along axis {axis}, got {given}")
        sizes = [s[axis] for s in shapes]
        self.cuts = np.cumsum(sizes)[:-1].tolist()
        return (*shapes[0][:axis], sum(sizes), *shapes[0][axis + 1 :])

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Copy the inputs next to each other."""
        return self.xp.concatenate(xs, axis=self._array_axis()), None

    def backward(self, dy: Array, saved: Saved) -> tuple[Array, ...]:
        """Split the gradient into those of the inputs."""
        parts = self.xp.split(dy, self.cuts, axis=self._array_axis())
        return tuple(part.copy() for part in parts)

    def cost(self, batch: int) -> Cost:
        """Copies."""
        moved = sum(self.elements(batch)) * self.dtype.itemsize
        return Cost(0, 0, moved, moved)

    def _array_axis(self) -> int:
        return self.axis if self.axis < 0 else self.axis + 1  # the batch comes first
