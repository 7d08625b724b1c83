"""Vectors of tokens, and logits of tokens from the same matrix."""

from __future__ import annotations

from math import prod

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext, toggled
from pydtnn.layers.cost import Cost
from pydtnn.layers.initializers import Initializer
from pydtnn.layers.recomputed import Recomputed, kept, restored
from pydtnn.layers.sequence import whole_numbers
from pydtnn.utils.validate import check_int


class Embedding(Layer):
    """The row of a matrix for each token: ``y_nt = w[x_nt]``.

    Models pass arrays of their own type from layer to layer, so tokens are whole numbers in float32
    or float64, which represent those up to 2**24 exactly.

    Parameters
    ----------
    tokens : int
        Number of different tokens K; they are 0 to K - 1.
    features : int
        Length C of a vector.
    initializer : str or Initializer
        By default normal with a deviation of 0.02.
    tied : bool
        Whether further uses of the layer compute logits of tokens from vectors, ``y = x w' + b``,
        with the same matrix (Press and Wolf, "Using the output embedding to improve language
        models", EACL 2017). Uses whose input has as many axes as that of the first one are vectors
        of tokens, too.
    bias : bool
        Whether these logits have a bias.

    Notes
    -----
    Input ``(N, ...)``, output ``(N, ..., C)``, parameter ``w (K, C)``, and with `bias` another one
    ``b (K,)``; input ``(N, ..., C)`` and output ``(N, ..., K)`` of a further use that computes
    logits. The gradient of a vector is the sum over its occurrences, in the order of samples and
    positions.

    Raises
    ------
    ValueError
        In `forward`, if a number is not a token: with the sample, the position and the value.
    """

    saves: tuple[str, ...] = ("input",)
    new_results = RESULTS
    supports: tuple[str, ...] = ("recomputed",)
    own: slice | None = None  # the tokens of this rank; the vectors of others are 0

    def __init__(
        self,
        tokens: int,
        features: int,
        *,
        initializer: str | Initializer = "embedding",
        tied: bool = False,
        bias: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.tokens = check_int(who, "tokens", tokens, at_least=1, at_most=2**24)
        self.features = check_int(who, "features", features, at_least=1)
        self.initializer, self.tied, self.bias = initializer, tied, bias

    @property
    def gives_logits(self) -> bool:
        """Whether this is a further use of a tied layer, with vectors as input."""
        if not self.tied or self.source is None:
            return False
        return len(self.input_shapes[0]) > len(self.source.input_shapes[0])

    def bind(self, backend: Backend, dtype: np.dtype, name: str, shapes: tuple[Shape, ...]) -> None:
        """Refuse models whose activations have 16 bits: they do not represent all tokens."""
        if dtype.itemsize == 2:
            raise self.fail(
                f"expected a model of float32 or float64, which represent all tokens, got {dtype}"
            )
        super().bind(backend, dtype, name, shapes)

    def build(self, *shapes: Shape) -> Shape:
        """Declare w (K, C)."""
        first, last, _ = (self.own or slice(None)).indices(self.tokens)
        matrix, shape = (last - first, self.features), self.single(shapes)
        self.w = self.parameter("w", matrix, self.initializer, fan_in=self.features, form="table")
        self.b = self.parameter("b", matrix[:1], "zeros", decay=False) if self.bias else None
        if not self.gives_logits:
            return (*shape, self.features)
        self.supports = toggled(self.supports, "regathered", True)
        if shape[-1:] != (self.features,):
            raise self.fail(
                f"expected vectors of {self.features} features, got an input of {shape}"
            )
        return (*shape[:-1], len(range(first, last)))

    def forward(self, *xs: Array | Recomputed, context: StepContext) -> tuple[Array, Saved]:
        """Copy the vectors of the tokens, or compute ``x w'``."""
        (x,) = xs
        y = self.empty(x.shape[0], self.output_shape)
        if self.gives_logits:
            bias = None if self.b is None else self.b.value
            self.backend.linear.forward(_rows(self.array(x)), self.w.value, bias, out=_rows(y))
            return y, kept(x)
        last = self.tokens - 1
        tokens = whole_numbers(self, "tokens", self.array(x), last, context.samples)
        rows, here = self._own_rows(tokens)
        self.backend.linear.take_rows(self.w.value, rows, out=_rows(y))
        if here is not None:
            self.xp.multiply(_rows(y), here, out=_rows(y))
        return y, (rows, here)

    def backward(self, dy: Array, saved: Saved) -> Array | None:
        """Add dy to the gradients of the vectors; the gradient of tokens is 0."""
        linear, w, b, dy = self.backend.linear, self.w, self.b, _rows(dy)
        if b is not None and not b.frozen and self.gives_logits:
            linear.backward_bias(dy, out=b.grad, accumulate=b.accumulate)
        elif b is not None and not b.frozen and not b.accumulate:
            b.grad[...] = 0  # no further use
        if not w.frozen and self.gives_logits:
            x = _rows(restored(saved))
            linear.backward_filter(x, dy, out=w.grad, accumulate=w.accumulate)
            del x  # before dx is allocated
        elif not w.frozen:
            rows, here = saved
            dy = dy if here is None else dy * here
            linear.add_rows(dy, rows, out=w.grad, accumulate=w.accumulate)
        if not self.needs_dx:
            return None
        shape = (len(dy) // prod(self.output_shape[:-1]), *self.input_shapes[0])
        if not self.gives_logits:
            return self.backend.zeros(shape, self.dtype)
        dx = self.backend.empty(shape, self.dtype)
        linear.backward_data(dy, w.value, out=_rows(dx))
        return dx

    def example(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        """Draw tokens."""
        if self.gives_logits:
            return super().example(shape, rng)
        return rng.integers(self.tokens, size=shape).astype(np.float32)

    def cost(self, batch: int) -> Cost:
        """A copy of the vectors, each element of dy added to a matrix of 0; or three products."""
        (inputs, outputs), itemsize = self.elements(batch), self.dtype.itemsize
        trained = not self.w.frozen
        if self.gives_logits:
            flops = 2 * inputs * self.w.shape[0]
            moved = (inputs + outputs + self.w.size) * itemsize
            products = trained + self.needs_dx
            return Cost(flops, flops * products, moved, moved * products)
        moved = (3 * outputs + self.w.size) * itemsize
        return Cost(0, outputs * trained, (inputs + 2 * outputs) * itemsize, moved * trained)

    def _own_rows(self, tokens: Array) -> tuple[Array, Array | None]:
        """Return rows of w, and factors (n, 1), 0 for tokens of others; None if all are own."""
        if self.own is None:
            return tokens, None
        rows = tokens - self.own.start
        inside = (rows >= 0) & (rows < self.w.shape[0])
        return self.xp.where(inside, rows, 0), inside[:, None].astype(self.dtype)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])  # (N, ..., C) -> (N * ..., C)
