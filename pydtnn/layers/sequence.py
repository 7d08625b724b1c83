"""Sequences: lengths of samples; learned vectors, a class token and positional embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext
from pydtnn.layers.cost import Cost
from pydtnn.layers.initializers import Initializer
from pydtnn.layers.masks import documents


def whole_numbers(layer: Layer, what: str, given: Array, most: int, samples: Any) -> Array:
    """Return an input as flat int64.

    Raises
    ------
    ValueError
        If one is not a whole number in 0..most: with the sample and the value.
    """
    flat = given.reshape(-1)
    with np.errstate(invalid="ignore"):  # NaN is found below
        numbers = flat.astype("int64")
    wrong = (numbers != flat) | (numbers < 0) | (numbers > most)
    if layer.backend.has_values and wrong.any():
        at = int(wrong.argmax())
        row, position = divmod(at, max(flat.size // max(len(given), 1), 1))
        place = f"at position {position} " if given.shape[1:] != (1,) else ""
        sample = row if samples is None else int(samples[row])
        raise layer.fail(
            f"{what} must be whole numbers in 0..{most}, got {float(flat[at]):g} {place}of sample "
            f"{sample}"
        )
    return numbers


class TakesLengths(Layer):
    """Base class of layers of sequences that may have a second input, the lengths of the samples.

    Lengths are ``(N, 1)``: only the first positions of a sample exist.
    """

    sequences = 1  # inputs besides the lengths

    def bind(self, backend: Backend, dtype: np.dtype, name: str, shapes: tuple[Shape, ...]) -> None:
        """Refuse lengths of 16 bits: they do not represent all."""
        if len(shapes) > self.sequences and dtype.itemsize == 2:
            raise self.fail(
                f"expected a model of float32 or float64, which represent all lengths, got {dtype}"
            )
        super().bind(backend, dtype, name, shapes)

    def sequence(self, shapes: tuple[Shape, ...]) -> Shape:
        """Return the shape of the first input, after a check of the second."""
        if shapes[1:] not in ((), ((1,),)):
            given = " and ".join(map(str, shapes[1:]))
            raise self.fail(f"a second input must be lengths of shape (1,), got {given}")
        return self.single(shapes[:1])

    def lengths(self, given: Array, context: StepContext) -> Array:
        """Return lengths as int64 ``(N,)``.

        Raises
        ------
        ValueError
            If one is not a whole number in 0..T: with the sample and the value.
        """
        return whole_numbers(self, "lengths", given, self.input_shapes[0][0], context.samples)

    def example(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        """Draw lengths, or the first input."""
        if shape[1:] != (1,):
            return super().example(shape, rng)
        return rng.integers(1, self.input_shapes[0][0] + 1, size=shape).astype(np.float32)


class TakesDocuments(TakesLengths):
    """Base class of layers of sequences whose last input may be the document of each position.

    Documents are ``(N, T)``, 0 where there is none; positions of one are next to each other.
    """

    own_positions: slice | None = None  # of this rank; documents are those of all positions

    def documents(self, given: Array, context: StepContext) -> Array:
        """Return the first position of the document of each one, and the end, ``(N, T, 2)``.

        Raises
        ------
        ValueError
            If a document is not a whole number in 0..2^24, or its positions are not next to each
            other: with the sample and the value.
        """
        ids = whole_numbers(self, "documents", given, 2**24, context.samples)
        try:
            seen = documents(self.backend.to_numpy(ids).reshape(given.shape))
        except ValueError as error:
            raise self.fail(str(error)) from None
        return self.backend.asarray(seen, np.dtype("int64"))

    def places(self, given: Array, context: StepContext) -> Array:
        """Return the distance of own positions to the first one of their document, ``(N, T)``."""
        first = self.documents(given, context)[..., 0]
        return (self.xp.arange(first.shape[1]) - first)[:, self.own_positions or slice(None)]

    def check_documents(self, length: int, shapes: tuple[Shape, ...]) -> int:
        """Return how many positions there are on all ranks, after a check of the last input."""
        if self.own_positions is None and shapes not in ((), ((length,),)):
            given = " and ".join(map(str, shapes))
            raise self.fail(f"a last input must be documents of shape ({length},), got {given}")
        return shapes[0][0] if shapes else length

    def example(self, shape: Shape, rng: np.random.Generator) -> np.ndarray:
        """Draw documents, or another input."""
        if len(shape) == 2 and shape[1] > 1:
            return np.sort(rng.integers(0, 4, size=shape)).astype(np.float32)
        return super().example(shape, rng)


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
    new_results = RESULTS
    supports = ("replay",)

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
        convert = self.backend.elementwise.convert
        convert(self.token.value, out=y[:, 0])
        convert(x, out=y[:, 1:])
        return y, None

    def backward(self, dy: Array, saved: Saved) -> Array | None:
        """Sum the gradient at the token's position; copy that of the sequence."""
        token = self.token
        if not token.frozen:
            self.backend.linear.backward_bias(dy[:, 0], out=token.grad, accumulate=token.accumulate)
        if not self.needs_dx:
            return None
        dx = self.empty(len(dy), self.input_shapes[0])
        self.backend.elementwise.convert(dy[:, 1:], out=dx)
        return dx

    def cost(self, batch: int) -> Cost:
        """Copies of the sequence; the sum of a vector of each sample."""
        (inputs, outputs), itemsize = self.elements(batch), self.dtype.itemsize
        token = 0 if self.token.frozen else outputs - inputs
        copied = 2 * inputs * self.needs_dx
        return Cost(0, token, (inputs + outputs) * itemsize, (token + copied) * itemsize)


class PositionalEmbedding(TakesDocuments):
    """Add a learned vector to each position: ``y[n, t] = x[n, t] + w[t]``.

    Parameters
    ----------
    initializer : str or Initializer

    Notes
    -----
    Input and output ``(N, T, D)``, parameter ``w (T, D)``. If a second input ``(N, T)`` is the
    document of each position (see `DotProductAttention`), positions are counted from the first one
    of their document.

    References
    ----------
    Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, section 3.1 and appendix D.4.
    Krell et al., "Efficient sequence packing without cross-contamination", 2021, section 3.2.
    """

    saves = ()
    views = ("gradient",)
    may_overwrite = ("input",)
    new_results = ("output",)
    supports = ("replay",)

    def __init__(
        self, *, initializer: str | Initializer = "embedding", name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.initializer = initializer

    def can_replay(self) -> bool:
        """Return whether there are no documents, which the array module checks."""
        return super().can_replay() and len(self.input_shapes) == 1

    def build(self, *shapes: Shape) -> Shape:
        """Declare w (T, D)."""
        length, features = _sequence(self, shapes[:1])
        positions = self.check_documents(length, shapes[1:])
        self.w = self.parameter("w", (positions, features), self.initializer, decay=False)
        return length, features

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Add the vectors of all positions."""
        x, *given = xs
        places = self.places(given[0], context) if given else None
        y = self.output_like(x)
        w = self.w.value if places is None else self.w.value[places]  # (T, D) or (N, T, D)
        self.backend.elementwise.add(x, w, out=y)
        return y, places

    def backward(self, dy: Array, saved: Saved) -> Array | tuple[Array, Array]:
        """Compute ``dw = sum over samples of dy``, or over documents; dx is dy."""
        w, linear = self.w, self.backend.linear
        if not w.frozen and saved is None:
            linear.backward_bias(
                dy.reshape(len(dy), w.size), out=w.grad.reshape(-1), accumulate=w.accumulate
            )
        elif not w.frozen:
            rows = dy.reshape(-1, dy.shape[-1])  # (N, T, D) -> (N T, D)
            linear.add_rows(rows, saved.reshape(-1), out=w.grad, accumulate=w.accumulate)
        if saved is None:
            return dy
        return dy, self.backend.zeros((len(dy), *self.input_shapes[1]), self.dtype)

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
