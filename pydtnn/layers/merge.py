"""Layers of several inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.kernels import Deferred, Source
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext
from pydtnn.layers.cost import Cost


class Add(Layer):
    """Sum of two or more inputs of equal shape."""

    saves = ()
    may_overwrite = ("input",)
    new_results = ("output",)
    supports = ("16 bits", "replay")
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


class Multiply(Layer):
    """Product of two inputs, the second of which may have a size of 1 along some axes.

    With the weights of channels ``(N, 1, 1, C)`` this is the excitation of images ``(N, H, W, C)``
    (Hu, Shen and Sun, "Squeeze-and-excitation networks", CVPR 2018, section 3.2).
    """

    saves = ("input",)
    new_results = RESULTS

    def build(self, *shapes: Shape) -> Shape:
        """Find the axes along which the second input is repeated."""
        first, *others = shapes
        if len(others) != 1 or len(others[0]) != len(first):
            given = " and ".join(map(str, shapes))
            raise self.fail(f"inputs must be two with equally many axes, got {given}")
        pairs = [*enumerate(zip(first, others[0], strict=True), start=1)]
        if any(n not in (1, size) for _, (size, n) in pairs):
            raise self.fail(
                f"the second input must have the sizes of the first {first}, or 1, got {others[0]}"
            )
        self.repeated = tuple(axis for axis, (size, n) in pairs if n != size)
        return first

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Multiply."""
        first, second = xs
        y = self.empty(len(first), self.output_shape)
        self.xp.multiply(first, second, out=y)
        return y, (first, second)

    def backward(self, dy: Array, saved: Saved) -> tuple[Array, ...]:
        """Multiply dy by the other input; sum over the axes of the repeated one."""
        first, second = saved
        other = dy * first
        if self.repeated:
            other = other.sum(axis=self.repeated, keepdims=True)
        return dy * second, other

    def cost(self, batch: int) -> Cost:
        """A product for each element; two in backward, and the sums of the repeated input."""
        (inputs, outputs), itemsize = self.elements(batch), self.dtype.itemsize
        moved = inputs + outputs
        summed = outputs if self.repeated else 0
        return Cost(outputs, 2 * outputs + summed, moved * itemsize, 2 * moved * itemsize)


class Concat(Layer):
    """Inputs side by side along one axis.

    Parameters
    ----------
    axis : int
        Axis of a sample: 0 is the first after the batch; by default the channels.

    Attributes
    ----------
    recomputed : bool
        Whether the output is not kept for the layers that read it, but computed again in backward;
        set by the fusion pass if what the inputs are computed of is kept, or much smaller.
    extends : bool
        Whether the first input is such an output, along the same axis.
    pitched : tuple of int
        The inputs whose gradients are views of that of the output: sums read them.
    """

    saves = ()
    new_results = RESULTS
    supports = ("16 bits", "deferred", "replay")
    recomputed = extends = False
    pitched: tuple[int, ...] = ()

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

    def forward(
        self, *xs: Array | Deferred, context: StepContext
    ) -> tuple[Array | Deferred, Saved]:
        """Copy the inputs next to each other."""
        y = self.join(xs)
        if not self.recomputed or not context.differentiable:
            return y, None
        value, first = Deferred.of(y, None), xs[0]
        before = first.source if self.extends and isinstance(first, Deferred) else None
        own = Source(self.join, xs if before is None else (*before.parts, *xs[1:]))
        value.sources = (own,)
        return value, before and (own, before)

    def join(self, xs: Sequence[Array | Deferred]) -> Array:
        """Return the inputs, or the parts of which they consist, side by side in a new array."""
        arrays = [self.array(x.restore() if isinstance(x, Deferred) else x) for x in xs]
        y = self.empty(len(arrays[0]), self.output_shape)
        cuts = np.cumsum([array.shape[self._axis] for array in arrays])[:-1].tolist()
        for x, part in zip(arrays, self.xp.split(y, cuts, axis=self._axis), strict=True):
            self.backend.elementwise.convert(x, out=part)
        return y

    def backward(self, dy: Array | Deferred, saved: Saved) -> tuple[Array, ...]:
        """Split the gradient into those of the inputs, of which `pitched` ones are views.

        A first input that was dropped is a part of the output, if that is there.
        """
        if saved is not None:
            own, before = saved
            if own.array is not None and before.array is None:
                before.array = self._copy(self._split(own.array)[0])
        parts = enumerate(self._split(self.array(dy)))
        return tuple(part if i in self.pitched else self._copy(part) for i, part in parts)

    def _copy(self, part: Array) -> Array:
        out = self.empty(len(part), part.shape[1:])
        self.backend.elementwise.convert(part, out=out)
        return out

    def cost(self, batch: int) -> Cost:
        """Copies."""
        moved = sum(self.elements(batch)) * self.dtype.itemsize
        return Cost(0, 0, moved, moved)

    @property
    def _axis(self) -> int:
        return self.axis if self.axis < 0 else self.axis + 1  # the batch comes first

    def _split(self, array: Array) -> list[Array]:
        return self.xp.split(array, self.cuts, axis=self._axis)
