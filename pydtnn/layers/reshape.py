"""Layers that rearrange values without arithmetic."""

from __future__ import annotations

from math import prod

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext
from pydtnn.layers.cost import NO_COST, Cost


class Identity(Layer):
    """Pass the input through."""

    saves = ()
    views = ("output", "gradient")
    supports = ("16 bits", "replay")

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Return the input."""
        return xs[0], None

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Return the gradient."""
        return dy

    def cost(self, batch: int) -> Cost:
        """No work."""
        return NO_COST


class Reshape(Layer):
    """View each sample in another shape.

    Parameters
    ----------
    shape : tuple of int
        Without the batch axis; one entry may be -1.
    """

    saves: tuple[str, ...] = ()
    views = ("output", "gradient")
    supports: tuple[str, ...] = ("16 bits", "replay")

    def __init__(self, shape: tuple[int, ...], *, name: str | None = None) -> None:
        super().__init__(name=name)
        if not isinstance(shape, tuple | list) or not all(
            isinstance(n, int) and (n > 0 or n == -1) for n in shape
        ):
            raise self.fail(f"shape must be a tuple of positive ints, one may be -1, got {shape!r}")
        self.shape = tuple(shape)

    def build(self, *shapes: Shape) -> Shape:
        """Fill in -1 and check the number of elements."""
        shape = self.single(shapes)
        size, known = prod(shape), prod(n for n in self.shape if n != -1)
        free = self.shape.count(-1)
        if free > 1 or (size % known if free and known else size != known):
            raise self.fail(f"shape must have as many elements as {shape}, got {self.shape}")
        return tuple(size // known if n == -1 else n for n in self.shape)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """View the batch in the output's shape."""
        return xs[0].reshape(len(xs[0]), *self.output_shape), None

    def backward(self, dy: Array, saved: Saved) -> Array:
        """View the gradient in the input's shape."""
        return dy.reshape(len(dy), *self.input_shapes[0])

    def cost(self, batch: int) -> Cost:
        """No work."""
        return NO_COST


class Flatten(Reshape):
    """View each sample as a vector, in the order (H, W, C): channels vary fastest.

    PyTorch flattens (C, H, W), so the matrix that follows has its columns permuted when weights are
    exchanged.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__((-1,), name=name)


class Transpose(Layer):
    """Permute the axes of each sample.

    Parameters
    ----------
    axes : tuple of int
        Axis i of the output's sample is axis ``axes[i]`` of the input's; 0 is the first after the
        batch.
    """

    saves = ()
    new_results = RESULTS
    supports = ("16 bits",)

    def __init__(self, axes: tuple[int, ...], *, name: str | None = None) -> None:
        super().__init__(name=name)
        if not isinstance(axes, tuple | list) or sorted(axes) != [*range(len(axes))]:
            raise self.fail(f"axes must be a permutation such as (1, 0), got {axes!r}")
        self.axes = tuple(axes)

    def build(self, *shapes: Shape) -> Shape:
        """Permute the shape."""
        shape = self.single(shapes)
        if len(self.axes) != len(shape):
            raise self.fail(f"axes must be those of the input {shape}, got {self.axes}")
        self.forth = (0, *(axis + 1 for axis in self.axes))
        self.back = tuple(self.forth.index(axis) for axis in range(len(self.forth)))
        return tuple(shape[axis] for axis in self.axes)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Copy the input in the other order."""
        return self.xp.ascontiguousarray(xs[0].transpose(self.forth)), None

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Copy the gradient in the order of the input."""
        return self.xp.ascontiguousarray(dy.transpose(self.back))

    def cost(self, batch: int) -> Cost:
        """A copy in each direction."""
        moved = sum(self.elements(batch)) * self.dtype.itemsize
        return Cost(0, 0, moved, moved)


class Pad(Layer):
    """Surround each sample with zeros.

    Parameters
    ----------
    padding : sequence of (before, after)
        One pair per axis of a sample, for an image ``((top, bottom), (left, right), (first, last
        channels))``.
    """

    saves = ()
    new_results = RESULTS
    supports = ("16 bits",)

    def __init__(self, padding: tuple[tuple[int, int], ...], *, name: str | None = None) -> None:
        super().__init__(name=name)
        if not isinstance(padding, tuple | list) or not all(
            isinstance(p, tuple | list) and len(p) == 2 and min(p) >= 0 for p in padding
        ):
            raise self.fail(
                f"padding must be (before, after) pairs of non-negative ints, got {padding!r}"
            )
        self.padding = tuple((before, after) for before, after in padding)

    def build(self, *shapes: Shape) -> Shape:
        """Add the padding to each axis."""
        shape = self.single(shapes)
        if len(self.padding) != len(shape):
            raise self.fail(
                f"padding must have one pair for each of the {len(shape)} axes of the input "
                f"{shape}, got {self.padding}"
            )
        self.inside = tuple(
            slice(before, before + n) for n, (before, _) in zip(shape, self.padding, strict=True)
        )
        return tuple(n + sum(p) for n, p in zip(shape, self.padding, strict=True))

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Copy the input into an array of zeros."""
        (x,) = xs
        y = self.backend.zeros((len(x), *self.output_shape), x.dtype)
        y[:, *self.inside] = x
        return y, None

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Copy the part of the gradient without the padding."""
        return dy[:, *self.inside].copy()

    def cost(self, batch: int) -> Cost:
        """Zeros, then a copy of the input; a copy of as many elements of dy."""
        inputs, outputs = self.elements(batch)
        copied = 2 * inputs * self.dtype.itemsize
        return Cost(0, 0, outputs * self.dtype.itemsize + copied, copied)


class Slice(Layer):
    """Take a (strided) part of each sample.

    Parameters
    ----------
    *slices : slice
        One per axis of a sample, from the first; omitted axes are kept whole. Steps must be
        positive.
    """

    saves = ()
    new_results = RESULTS
    supports = ("16 bits",)

    def __init__(self, *slices: slice, name: str | None = None) -> None:
        super().__init__(name=name)
        if not all(isinstance(s, slice) and (s.step is None or s.step > 0) for s in slices):
            raise self.fail(f"expected slices with positive steps, one per axis, got {slices}")
        self.slices = slices

    def build(self, *shapes: Shape) -> Shape:
        """Compute the shape of the part."""
        shape = self.single(shapes)
        if len(self.slices) > len(shape):
            raise self.fail(f"expected at most one slice per axis of {shape}, got {self.slices}")
        cut = zip(shape, self.slices, strict=False)
        part = (*(len(range(n)[s]) for n, s in cut), *shape[len(self.slices) :])
        if 0 in part:
            raise self.fail(f"slices must select elements of the input {shape}, got {self.slices}")
        return part

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Copy the part, so that the input can be freed."""
        return xs[0][:, *self.slices].copy(), None

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Copy the gradient into an array of zeros."""
        dx = self.backend.zeros((len(dy), *self.input_shapes[0]), dy.dtype)
        dx[:, *self.slices] = dy
        return dx

    def cost(self, batch: int) -> Cost:
        """A copy of the part; zeros, then a copy of dy."""
        inputs, outputs = self.elements(batch)
        copied = 2 * outputs * self.dtype.itemsize
        return Cost(0, 0, copied, inputs * self.dtype.itemsize + copied)
