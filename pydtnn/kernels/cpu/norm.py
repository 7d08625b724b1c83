"""Compiled batch, layer, group and local response normalisation."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels.cpu._norm import NormKernels
from pydtnn.kernels.cpu.compiled import (
    FLOAT64,
    STORED,
    Compiled,
    Widened,
    beside,
    contiguous,
    native,
    require,
    supported,
    through_float32,
)
from pydtnn.kernels.reference import norm as reference
from pydtnn.kernels.reference.family import Array


class CpuNorm(Widened, Compiled, reference.NormKernels):
    """Normalisation on the CPU; shapes as in the reference.

    Coefficients per channel may be float32 or float64. In float64, the affine maps of float32 data
    have no cancellation if the mean is much larger than the deviation.
    """

    table = NormKernels

    def statistics(self, x: Array, *, out: Array, accumulate: bool = False) -> None:
        """Compute count, sums and sums of squares of each channel, in one part or two."""
        require(x.dtype in STORED and _doubles(out))
        channels = x.shape[-1]
        if len(out) != 1 + 4 * channels:
            self.kernels.statistics(contiguous(x), out, accumulate, self.threads)
            return
        # in two parts: relative to the mean from sums in one part
        sums = np.empty(1 + 2 * channels)
        self.kernels.statistics(contiguous(x), sums, False, self.threads)
        pivot = sums[1 : 1 + channels] / max(sums[0], 1)
        self.kernels.statistics(contiguous(x - pivot), sums, False, self.threads)
        offsets, squares = sums[1:].reshape(2, -1)
        self._store_parts(sums[0], pivot, offsets, squares, out, accumulate)

    def normalize(self, x: Array, scale: Array, shift: Array, *, out: Array) -> None:
        """Compute ``out = x scale + shift`` with coefficients (C,); `out` may be `x`."""
        require(supported(out, x))
        self.kernels.normalize(contiguous(x), scale, shift, out, self.threads)

    def backward_statistics(
        self,
        x: Array,
        dy: Array,
        mean: Array,
        inv_std: Array,
        *,
        out: Array,
        accumulate: bool = False,
    ) -> None:
        """Compute ``sum dy`` and ``sum dy xhat`` of each channel into `out` (2, C)."""
        require(x.dtype in STORED and dy.dtype == x.dtype and _doubles(out))
        self.kernels.backward_statistics(
            contiguous(x), contiguous(dy), mean, inv_std, out, accumulate, self.threads
        )

    def backward_normalize(
        self, x: Array, dy: Array, a: Array, b: Array, c: Array, *, out: Array
    ) -> None:
        """Compute ``out = a dy + b x + c`` with coefficients (C,); `out` may be `dy`."""
        require(supported(out, x, dy))
        self.kernels.backward_normalize(contiguous(x), contiguous(dy), a, b, c, out, self.threads)

    def coefficients(
        self,
        sums: Array,
        gamma: Array,
        beta: Array,
        epsilon: float,
        *,
        moments: Array,
        out: Array,
        collect: Array | None = None,
    ) -> None:
        """Compute mean and 1 / deviation into `moments`, pivot, factor and shift into `out`."""
        require(self.kernels.coefficients(sums, gamma, beta, epsilon, moments, out, collect))

    def backward_coefficients(
        self,
        sums: Array,
        rows: float,
        moments: Array,
        pivot: Array,
        gamma: Array,
        *,
        dgamma: Array,
        dbeta: Array,
        out: Array,
        accumulate: bool = False,
    ) -> None:
        """Compute a, b, c of ``dx = a dz + b (x - pivot) + c``, and the parameters' gradients."""
        require(
            self.kernels.backward_coefficients(
                sums, rows, moments, pivot, gamma, dgamma, dbeta, out, accumulate
            )
        )

    def group_forward(
        self,
        x: Array,
        gamma: Array,
        beta: Array,
        groups: int,
        epsilon: float,
        *,
        out: Array,
        mean: Array,
        inv_std: Array,
    ) -> None:
        """Normalise ``x (N, P, C)`` per sample and group of channels, then scale and shift."""
        taken = supported(out, x) and beside(x, gamma, beta)
        require(taken and _doubles(mean) and _doubles(inv_std))
        self.kernels.group_forward(
            contiguous(x),
            contiguous(gamma),
            contiguous(beta),
            groups,
            epsilon,
            out,
            mean,
            inv_std,
            self.threads,
        )

    def group_backward(
        self,
        x: Array,
        dy: Array,
        gamma: Array,
        groups: int,
        mean: Array,
        inv_std: Array,
        *,
        out: Array,
        dgamma: Array,
        dbeta: Array,
        accumulate: bool = False,
    ) -> None:
        """Compute dx into `out` and the gradients of gamma and beta (C,)."""
        require(
            supported(out, x, dy)
            and beside(x, gamma)
            and native(dgamma, gamma)
            and native(dbeta, gamma)
            and _doubles(mean)
            and _doubles(inv_std)
        )
        self.kernels.group_backward(
            contiguous(x),
            contiguous(dy),
            contiguous(gamma),
            groups,
            mean,
            inv_std,
            out,
            dgamma,
            dbeta,
            accumulate,
            self.threads,
        )

    def rms_forward(
        self, x: Array, gamma: Array, epsilon: float, *, out: Array, inv_rms: Array
    ) -> None:
        """Compute ``x gamma / sqrt(mean x^2 + epsilon)`` of each row: a layer norm of mean 0."""
        require(supported(out, x) and beside(x, gamma) and _doubles(inv_rms))
        x, gamma, mean = contiguous(x), contiguous(gamma), np.empty_like(inv_rms)
        given = x[:, None], gamma, None, 1, epsilon, out[:, None], mean, inv_rms
        self.kernels.group_forward(*given, self.threads)

    def rms_backward(
        self,
        x: Array,
        dy: Array,
        gamma: Array,
        inv_rms: Array,
        *,
        out: Array,
        dgamma: Array,
        accumulate: bool = False,
    ) -> None:
        """Compute dx into `out`, which may be `dy`, and the gradient of gamma (C,)."""
        taken = supported(out, x, dy) and beside(x, gamma) and native(dgamma, gamma)
        require(taken and _doubles(inv_rms))
        x, dy, gamma = (contiguous(array) for array in (x, dy, gamma))
        given = x[:, None], dy[:, None], gamma, 1, np.zeros_like(inv_rms), inv_rms
        self.kernels.group_backward(*given, out[:, None], dgamma, None, accumulate, self.threads)

    @through_float32
    def local_response_forward(
        self, x: Array, size: int, alpha: float, beta: float, k: float, *, out: Array
    ) -> None:
        """Divide each element by a power of the mean square of `size` channels around it."""
        require(native(out, x))
        self.kernels.response_forward(contiguous(x), size, alpha, beta, k, out, self.threads)

    @through_float32
    def local_response_backward(
        self, x: Array, dy: Array, size: int, alpha: float, beta: float, k: float, *, out: Array
    ) -> None:
        """Compute dx into `out`, which may be `dy`."""
        require(native(out, x, dy))
        x, dy = contiguous(x), contiguous(dy)
        self.kernels.response_backward(x, dy, size, alpha, beta, k, out, self.threads)


def _doubles(array: Array) -> bool:
    """Return whether the kernels can access this array of statistics without a copy."""
    return array.dtype == FLOAT64 and array.flags.carray
