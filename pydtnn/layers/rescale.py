"""Multiplication by a constant."""

from __future__ import annotations

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, StepContext
from pydtnn.layers.cost import Cost, per_element
from pydtnn.utils.validate import check_float


class Rescale(Layer):
    """``factor x``, for example to extend the range of a last `Tanh` to that of the targets.

    Parameters
    ----------
    factor : float
        A constant, which is not trained.
    """

    saves = ()
    may_overwrite = ("input", "dy")
    new_results = RESULTS

    def __init__(self, factor: float, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.factor = check_float(type(self).__name__, "factor", factor)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Multiply."""
        (x,) = xs
        y = self.output_like(x)
        self.xp.multiply(x, self.factor, out=y)
        return y, None

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Multiply by the same factor."""
        dx = self.gradient_like(dy)
        self.xp.multiply(dy, self.factor, out=dx)
        return dx

    def cost(self, batch: int) -> Cost:
        """A product for each element, of the output and of dx."""
        return per_element(self.elements(batch), self.dtype.itemsize, 1, 1, saved=0)
