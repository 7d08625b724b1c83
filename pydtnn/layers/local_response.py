"""Normalisation across neighbouring channels."""

from __future__ import annotations

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Layer, Saved, Shape, StepContext
from pydtnn.layers.cost import Cost, per_element
from pydtnn.utils.validate import number, whole


class LocalResponseNorm(Layer):
    """``x / (k + alpha / size sum of x^2)^beta``, the sum over `size` neighbouring channels.

    These are channels ``c - size // 2 .. c + (size - 1) // 2``, of which those that do not exist
    count as zeros, as in PyTorch. The paper's `alpha` is the one here divided by `size`.

    Parameters
    ----------
    size : int
        Channels of a window.
    alpha, beta : float
    k : float
        Positive.

    Notes
    -----
    Input and output ``(N, ..., C)``.

    References
    ----------
    Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural
    networks", 2012, section 3.3.
    """

    saves = ("input",)
    new_output = new_gradient = may_overwrite_dy = takes_16_bits = True

    def __init__(
        self,
        size: int,
        *,
        alpha: float = 1e-4,
        beta: float = 0.75,
        k: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.size = whole(who, "size", size, at_least=1)
        self.alpha = number(who, "alpha", alpha, at_least=0)
        self.beta = number(who, "beta", beta)
        self.k = number(who, "k", k, above=0)

    def build(self, *shapes: Shape) -> Shape:
        """Check that there are channels."""
        return self.single(shapes, axes=1)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Divide by the power of the mean square."""
        (x,) = xs
        y = self.empty(len(x), self.output_shape)
        self.backend.norm.local_response_forward(x, self.size, self.alpha, self.beta, self.k, out=y)
        return y, x

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Differentiate through the divisors of all windows that contain a channel."""
        dx = self.gradient_like(dy)
        self.backend.norm.local_response_backward(
            saved, dy, self.size, self.alpha, self.beta, self.k, out=dx
        )
        return dx

    def cost(self, batch: int) -> Cost:
        """Squares, sums over windows, a power and a product; backward two of these sums.

        A power is a logarithm, a product and an exponential.
        """
        divisor = 1 + self.size - 1 + 2 + 3  # square, sum, scale and k, power
        backward = divisor + 3 + self.size - 1 + 3
        return per_element(self.elements(batch), self.dtype.itemsize, divisor + 1, backward)
