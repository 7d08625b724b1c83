"""Dropout."""

from __future__ import annotations

from math import prod
from typing import Any

from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.random import stream
from pydtnn.layers.base import Layer, Saved, Shape, StepContext
from pydtnn.layers.cost import Cost, per_element
from pydtnn.utils.validate import check_float


class Dropout(Layer):
    """Zero each element with probability `rate` in training, else scale it by ``1 / (1 - rate)``.

    The mask is a function of (seed, this layer's name, epoch, sample): it depends neither on ranks
    nor on threads, and backward draws it again instead of storing it.

    Parameters
    ----------
    rate : float
        In [0, 1).

    References
    ----------
    Srivastava et al., "Dropout", JMLR 2014, section 4.
    """

    saves = ()
    may_overwrite = ("input", "dy")
    new_results = ("gradient",)
    whole_shape: Shape = ()
    supports = ("16 bits", "replay")
    part: tuple[slice, ...] | None = None  # this rank's part of a sample of the whole shape

    def __init__(self, rate: float = 0.5, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.rate = check_float("Dropout", "rate", rate, at_least=0, below=1)

    def build(self, *shapes: Shape) -> Shape:
        """Derive the key of the masks from the layer's name."""
        self.stream = stream(str(self.name))
        return self.single(shapes)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Apply the mask in training; otherwise return the input."""
        (x,) = xs
        if not context.training or self.rate == 0:
            return x, None
        if context.samples is None:
            raise self.fail("training requires the ids of the samples; set StepContext.samples")
        samples = self.backend.asarray(context.samples)
        key = (context.seed, self.stream, context.epoch, samples)
        y = self.output_like(x)
        self._apply(x, key, y)
        return y, key

    def _apply(self, x: Array, key: Any, out: Array) -> None:
        """Multiply by the mask, or by this rank's part of it."""
        if self.part is None:
            self.backend.random.dropout(x, self.rate, *key, out=out)
            return
        mask = self.backend.empty((len(x), *self.whole_shape), x.dtype)
        mask[...] = 1
        self.backend.random.dropout(mask, self.rate, *key, out=mask)
        self.xp.multiply(x, mask[:, *self.part], out=out)

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Apply the same mask to the gradient."""
        if saved is None:
            if self.overwrites_dy:
                return dy
            dx = self.gradient_like(dy)
            self.backend.elementwise.convert(dy, out=dx)
            return dx
        dx = self.gradient_like(dy)
        self._apply(dy, saved, dx)
        return dx

    def cost(self, batch: int) -> Cost:
        """A comparison and a product per element, in both directions; without a rate, a copy of dy.

        For a part of a sample, the mask of all of it is written, multiplied by itself, and read in
        part.
        """
        if self.rate == 0:
            copied = 0 if self.overwrites_dy else 2 * batch * prod(self.output_shape)
            return Cost(0, 0, 0, copied * self.dtype.itemsize)
        cost = per_element(self.elements(batch), self.dtype.itemsize, 2, 2, saved=0)
        if self.part is None:
            return cost
        outputs, whole = batch * prod(self.output_shape), batch * prod(self.whole_shape)
        flops = outputs + 2 * whole
        moved = (3 * outputs + 3 * whole) * self.dtype.itemsize
        return Cost(flops, flops, moved, moved)
