"""Learned vectors of sequences: a class token and positional embeddings."""

from __future__ import annotations

from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import Layer, Saved, Shape, StepContext
from pydtnn.layers.cost import Cost
from pydtnn.layers.initializers import Initializer


class ClassToken(Layer):
    """Put a learned vector before the first position of each sequence.

    Parameters
    ----------
    initializer : str or Initializer

    Notes
    -----
    Input ``(N, T, D)``, output ``(N, T + 1, D)``, parameter ``token (D,)``.

    References
    ----------
    Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, section 3.1.
    """

    saves = ()
    new_output = new_gradient = True

    def __init__(
        self, *, initializer: str | Initializer = "zeros", name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.initializer = initializer

    def build(self, *shapes: Shape) -> Shape:
        """Declare the token (D,)."""
        length, features = _sequence(self, shapes)
        self.token = self.parameter("token", (features,), self.initializer, decay=False)
        return length + 1, features

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Copy the token and the sequence next to each other."""
        (x,) = xs
        y = self.empty(len(x), self.output_shape)
        y[:, 0] = self.token.value
        y[:, 1:] = x
        return y, None

    def backward(self, dy: Array, saved: Saved) -> Array | None:
        """Sum the gradient at the token's position; copy that of the sequence."""
        token = self.token
        if not token.frozen:
            self.backend.linear.backward_bias(dy[:, 0], out=token.grad, accumulate=token.accumulate)
        return dy[:, 1:].copy() if self.needs_dx else None

    def cost(self, batch: int) -> Cost:
        """Copies of the sequence; the sum of a vector of each sample."""
        (inputs, outputs), itemsize = self.elements(batch), self.dtype.itemsize
        token = 0 if self.token.frozen else outputs - inputs
        copied = 2 * inputs * self.needs_dx
        return Cost(0, token, (inputs + outputs) * itemsize, (token + copied) * itemsize)


class PositionalEmbedding(Layer):
    """Add a learned vector to each position: ``y[n, t] = x[n, t] + w[t]``.

    Parameters
    ----------
    initializer : str or Initializer

    Notes
    -----
    Input and output ``(N, T, D)``, parameter ``w (T, D)``.

    References
    ----------
    Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, section 3.1 and appendix D.4.
    """

    saves = ()
    views = ("gradient",)
    may_overwrite_input = new_output = True

    def __init__(
        self, *, initializer: str | Initializer = "embedding", name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.initializer = initializer

    def build(self, *shapes: Shape) -> Shape:
        """Declare w (T, D)."""
        shape = _sequence(self, shapes)
        self.w = self.parameter("w", shape, self.initializer, decay=False)
        return shape

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Add the vectors of all positions."""
        (x,) = xs
        y = self.output_like(x)
        self.xp.add(x, self.w.value, out=y)
        return y, None

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Compute ``dw = sum over samples of dy``; dx is dy."""
        w = self.w
        if not w.frozen:
            self.backend.linear.backward_bias(
                dy.reshape(len(dy), w.size), out=w.grad.reshape(-1), accumulate=w.accumulate
            )
        return dy

    def cost(self, batch: int) -> Cost:
        """An addition per element, in both directions."""
        (_, outputs), itemsize = self.elements(batch), self.dtype.itemsize
        added = 0 if self.w.frozen else outputs
        return Cost(outputs, added, (2 * outputs + self.w.size) * itemsize, added * itemsize)


def _sequence(layer: Layer, shapes: tuple[Shape, ...]) -> tuple[int, int]:
    """Return positions and features of the only input."""
    shape = layer.single(shapes)
    if len(shape) != 2:
        raise layer.fail(f"expected an input of shape (T, D), got {shape}")
    return shape[0], shape[1]
