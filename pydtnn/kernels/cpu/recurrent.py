"""Compiled steps of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pydtnn.kernels.cpu._recurrent import GRU, LSTM, RecurrentKernels
from pydtnn.kernels.cpu.compiled import Compiled, contiguous, native, require
from pydtnn.kernels.reference import recurrent as reference
from pydtnn.kernels.reference.family import Array


class CpuRecurrent(Compiled, reference.RecurrentKernels):
    """LSTMs and GRUs on the CPU; shapes as in the reference."""

    table = RecurrentKernels

    def lstm_forward(
        self,
        gates: Array,
        u: Array,
        b: Array,
        *,
        out: Array,
        cells: Array,
        first: Sequence[Array] = (),
        reverse: bool = False,
        lengths: Array | None = None,
    ) -> None:
        """Compute ``c = f c' + i g`` into `cells` and ``h = o tanh(c)`` into `out`."""
        require(native(out, u, b, *first) and _writable(out, gates, cells))
        self.kernels.forward(
            *(LSTM, gates, contiguous(u), contiguous(b), *_states(first, 2)),
            *(out, cells, reverse, _lengths(lengths), self.threads),
        )

    def lstm_backward(
        self,
        dy: Array,
        gates: Array,
        cells: Array,
        u: Array,
        *,
        out: Array,
        first: Sequence[Array] = (),
        dfirst: Sequence[Array] = (),
        reverse: bool = False,
        lengths: Array | None = None,
    ) -> None:
        """Compute the gradients of the terms of the input and of the state, which are equal."""
        require(native(out, dy, gates, cells, u, *first) and _writable(out, *dfirst))
        dy, gates, cells, u = map(contiguous, (dy, gates, cells, u))
        self.kernels.backward(
            *(LSTM, dy, gates, cells, cells, u, *_states(first, 2), out, None),
            *(*_states(dfirst, 2), reverse, _lengths(lengths), self.threads),
        )

    def gru_forward(
        self,
        gates: Array,
        u: Array,
        b: Array,
        *,
        out: Array,
        products: Array,
        first: Sequence[Array] = (),
        reverse: bool = False,
        lengths: Array | None = None,
    ) -> None:
        """Compute ``n = tanh(a + r (h' u' + b))`` and ``h = (1 - z) n + z h'`` into `out`."""
        require(native(out, u, b, *first) and _writable(out, gates, products))
        self.kernels.forward(
            *(GRU, gates, contiguous(u), contiguous(b), *_states(first, 1)),
            *(out, products, reverse, _lengths(lengths), self.threads),
        )

    def gru_backward(
        self,
        dy: Array,
        gates: Array,
        y: Array,
        products: Array,
        u: Array,
        *,
        out: Array,
        dproducts: Array,
        first: Sequence[Array] = (),
        dfirst: Sequence[Array] = (),
        reverse: bool = False,
        lengths: Array | None = None,
    ) -> None:
        """Compute the gradients of the terms of the input, and into `dproducts` of the state."""
        given = (dy, gates, y, products, u)
        require(native(out, *given, *first) and _writable(out, dproducts, *dfirst))
        dy, gates, y, products, u = map(contiguous, given)
        self.kernels.backward(
            *(GRU, dy, gates, y, products, u, *_states(first, 1), out, dproducts),
            *(*_states(dfirst, 1), reverse, _lengths(lengths), self.threads),
        )


def _writable(out: Array, *others: Array) -> bool:
    """Return whether kernels can write to arrays: contiguous ones of the type of `out`."""
    return all(native(array, out) for array in others)


def _states(given: Sequence[Array], count: int) -> tuple[Array | None, Array | None]:
    """Return h and c, None if they are not given."""
    h, c = (*map(contiguous, given), None, None)[:2]
    return h, c if count == 2 else None


def _lengths(lengths: Array | None) -> Array | None:
    return None if lengths is None else np.require(lengths, np.int64, ["C", "A"])
