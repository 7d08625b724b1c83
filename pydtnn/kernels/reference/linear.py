"""Reference kernels of fully connected layers: three matrix products and a column sum."""

from __future__ import annotations

from pydtnn.kernels.reference.family import Array, Family


class Linear(Family):
    """``y = x w' + b`` with ``x (N, I)``, ``w (O, I)``, ``b (O,)``, ``y (N, O)``."""

    def forward(self, x: Array, w: Array, b: Array | None, *, out: Array) -> None:
        """Compute ``out = x w' + b``."""
        self.xp.matmul(x, w.T, out=out)
        if b is not None:
            out += b

    def backward_data(self, dy: Array, w: Array, *, out: Array) -> None:
        """Compute ``dx = dy w`` into `out` (N, I)."""
        self.xp.matmul(dy, w, out=out)

    def backward_filter(self, x: Array, dy: Array, *, out: Array, accumulate: bool = False) -> None:
        """Compute ``dw = dy' x`` into `out` (O, I)."""
        self.store(self.xp.matmul(dy.T, x), out, accumulate)

    def backward_bias(self, dy: Array, *, out: Array, accumulate: bool = False) -> None:
        """Sum `dy` (..., C) over all axes but the last into `out` (C,)."""
        self.store(dy.reshape(-1, dy.shape[-1]).sum(axis=0), out, accumulate)
