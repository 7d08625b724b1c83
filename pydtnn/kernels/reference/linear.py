"""Reference kernels of fully connected layers: three matrix products and a column sum.

The rows of a matrix are those of products with one-hot vectors, so embeddings are here, too.

Beside 16-bit arrays, biases and gradients of parameters are float32; products are summed in float32
and rounded once.
"""

from __future__ import annotations

from pydtnn.kernels.reference.family import Array, KernelFamily, wide


class LinearKernels(KernelFamily):
    """``y = x w' + b`` with ``x (N, I)``, ``w (O, I)``, ``b (O,)``, ``y (N, O)``."""

    def forward(self, x: Array, w: Array, b: Array | None, *, out: Array) -> None:
        """Compute ``out = x w' + b``."""
        y = wide(x) @ wide(w).T
        out[...] = y if b is None else y + b

    def backward_data(self, dy: Array, w: Array, *, out: Array) -> None:
        """Compute ``dx = dy w`` into `out` (N, I)."""
        out[...] = wide(dy) @ wide(w)

    def backward_filter(self, x: Array, dy: Array, *, out: Array, accumulate: bool = False) -> None:
        """Compute ``dw = dy' x`` into `out` (O, I)."""
        self.store(wide(dy).T @ wide(x), out, accumulate)

    def backward_bias(self, dy: Array, *, out: Array, accumulate: bool = False) -> None:
        """Sum `dy` (..., C) over all axes but the last into `out` (C,)."""
        self.store(wide(dy).reshape(-1, dy.shape[-1]).sum(axis=0), out, accumulate)

    def take_rows(self, w: Array, rows: Array, *, out: Array) -> None:
        """Copy the rows ``w[rows]`` of `w` (K, C) into `out` (N, C); `rows` (N,) are in 0..K-1."""
        out[...] = w[rows]

    def add_rows(self, dy: Array, rows: Array, *, out: Array, accumulate: bool = False) -> None:
        """Add each row of `dy` (N, C) to the row ``rows[n]`` of `out` (K, C)."""
        if not accumulate:
            out[...] = 0
        for k in sorted({*rows.tolist()}):
            out[k] += wide(dy)[rows == k].sum(axis=0)
