"""Attention on a GPU: the steps of the reference, with products by cuBLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydtnn.kernels.reference import attention as reference
from pydtnn.kernels.reference.family import Array


class CudaAttention(reference.AttentionKernels):
    """Scaled dot-product attention; shapes as in the reference.

    CuPy refuses to call cuBLAS while a step is captured in a graph.

    Parameters
    ----------
    xp : module
        ``cupy``.
    multiply : callable
        ``multiply(a, b, out, accumulate)``, see `pydtnn.kernels.cuda.cublas.Products`.
    """

    def __init__(self, xp: Any, multiply: Callable[[Array, Array, Array, bool], None]) -> None:
        super().__init__(xp)
        self._multiply = multiply

    def _product(self, a: Array, b: Array) -> Array:
        """Compute ``a b`` of each sample and head, (N, H, M, K) and (N, H, K, L)."""
        shape = (*a.shape[:-1], b.shape[-1])
        a, b = (x.reshape(-1, *x.shape[2:]) for x in (a, b))
        out = self.xp.empty((len(a), *shape[2:]), a.dtype)
        self._multiply(a, b, out, False)
        return out.reshape(shape)
