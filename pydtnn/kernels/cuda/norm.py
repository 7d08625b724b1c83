"""Batch, layer and group normalisation on a GPU."""

from __future__ import annotations

from typing import Any

from pydtnn.kernels.cuda.layout import THREADS, ceil, team
from pydtnn.kernels.cuda.module import ELEMENTS, CudaKernels, all_of, native, number, vectors
from pydtnn.kernels.dtypes import arithmetic
from pydtnn.kernels.reference import norm as reference
from pydtnn.kernels.reference.family import Array, Number

NO_MAP = (None, None, 0.0, None, None, None)
"""Arguments of `statistics` where no coefficients are wanted."""


class CudaNorm(CudaKernels, reference.NormKernels):
    """Normalisation as in the reference.

    Parameters, their gradients and the coefficients of maps have the type of the arrays; beside
    16-bit arrays they are float32.
    """

    source = "norm"

    def sums_length(self, channels: int, dtype: Any) -> int:
        """Sums in one part, of any type."""
        return 1 + 2 * channels

    def statistics(self, x: Array, *, out: Array, accumulate: bool = False) -> None:
        """Compute the count, sums and sums of squares of each channel into `out` (1 + 2 C,)."""
        if x.dtype.name not in ELEMENTS or not all_of("float64", out):
            return super().statistics(x, out=out, accumulate=accumulate)
        x = self.xp.ascontiguousarray(x)
        self.summed("statistics", *_shape(x), 2, x, x, out, accumulate, *NO_MAP)

    def statistics_coefficients(
        self,
        x: Array,
        gamma: Array,
        beta: Array,
        epsilon: float,
        *,
        sums: Array,
        moments: Array,
        out: Array,
        collect: Array | None = None,
    ) -> None:
        """Compute `statistics` into `sums`, and in the same kernel what `coefficients` makes."""
        taken = x.dtype.name in ELEMENTS and all_of(arithmetic(x.dtype), out, gamma, beta)
        if not (taken and all_of("float64", sums, moments, collect)):
            return super().statistics_coefficients(
                *(x, gamma, beta, epsilon), sums=sums, moments=moments, out=out, collect=collect
            )
        x = self.xp.ascontiguousarray(x)
        given = (gamma, beta, float(epsilon), moments, out, collect)
        self.summed("statistics", *_shape(x), 2, x, x, sums, False, *given)

    def normalize(self, x: Array, scale: Array, shift: Array, *, out: Array) -> None:
        """Compute ``out = x scale + shift`` with coefficients (C,); `out` may be `x`."""
        if not native(out, x):
            return super().normalize(x, scale, shift, out=out)
        x = self.xp.ascontiguousarray(x)
        tables = self._doubles(scale, shift)
        self.per_channel("normalize", *_shape(x), out, x, *tables, out, arrays=(x, *tables))

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
        if x.dtype.name not in ELEMENTS or dy.dtype != x.dtype or not all_of("float64", out):
            return super().backward_statistics(x, dy, mean, inv_std, out=out, accumulate=accumulate)
        x, dy = self.xp.ascontiguousarray(x), self.xp.ascontiguousarray(dy)
        tables = self._doubles(mean, inv_std)
        given = (x, dy, *tables, out, accumulate)
        self.summed("backward_statistics", *_shape(x), 2, x, *given, arrays=(dy, *tables))

    def backward_normalize(
        self, x: Array, dy: Array, a: Array, b: Array, c: Array, *, out: Array
    ) -> None:
        """Compute ``out = a dy + b x + c`` with coefficients (C,); `out` may be `dy`."""
        if not native(out, x, dy):
            return super().backward_normalize(x, dy, a, b, c, out=out)
        x, dy = self.xp.ascontiguousarray(x), self.xp.ascontiguousarray(dy)
        tables = self._doubles(a, b, c)
        given, arrays = (x, dy, *tables, out), (x, dy, *tables)
        self.per_channel("backward_normalize", *_shape(x), out, *given, arrays=arrays)

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
        kind = out.dtype.name
        taken = _real(kind) and all_of(kind, out, gamma, beta)
        if not (taken and all_of("float64", sums, moments, collect)):
            return super().coefficients(
                sums, gamma, beta, epsilon, moments=moments, out=out, collect=collect
            )
        channels = len(gamma)
        grid = (ceil(channels, THREADS),)
        given = (sums, gamma, beta, float(epsilon), moments, out, collect, channels)
        self.launch("coefficients", kind, grid, (THREADS,), *given)

    def backward_coefficients(
        self,
        sums: Array,
        rows: Number,
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
        kind = out.dtype.name
        taken = _real(kind) and all_of(kind, out, pivot, gamma, dgamma, dbeta)
        if not (taken and all_of("float64", sums, moments)):
            return super().backward_coefficients(
                *(sums, rows, moments, pivot, gamma),
                dgamma=dgamma,
                dbeta=dbeta,
                out=out,
                accumulate=accumulate,
            )
        channels = len(gamma)
        grid = (ceil(channels, THREADS),)
        given = (sums, *number(rows), moments, pivot, gamma, dgamma, dbeta, out, accumulate)
        self.launch("backward_coefficients", kind, grid, (THREADS,), *given, channels)

    def fold(self, sums: Array, running: Array, indices: Array, momentum: Array) -> None:
        """Move running means and variances towards those of a step's sums, and clear these."""
        channels = len(momentum)
        if channels:
            given = (sums, running, indices, momentum, self.device.go, channels)
            self.step("fold", ceil(channels, THREADS), THREADS, *given, self.device.arrived)

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
        taken = _grouped(out, x) and all_of("float64", mean, inv_std)
        if not (taken and all_of(arithmetic(out.dtype), gamma, beta)):
            return super().group_forward(
                x, gamma, beta, groups, epsilon, out=out, mean=mean, inv_std=inv_std
            )
        x = self.xp.ascontiguousarray(x)
        given = (x, gamma, beta, float(epsilon), out, mean, inv_std)
        self._groups("group_forward", groups, given, (out, x, gamma, beta))

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
        taken = _grouped(out, x, dy) and all_of("float64", mean, inv_std)
        if not (taken and all_of(arithmetic(out.dtype), gamma, dgamma, dbeta)):
            return super().group_backward(
                *(x, dy, gamma, groups, mean, inv_std),
                out=out,
                dgamma=dgamma,
                dbeta=dbeta,
                accumulate=accumulate,
            )
        x, dy = self.xp.ascontiguousarray(x), self.xp.ascontiguousarray(dy)
        given = (x, dy, mean, inv_std, dgamma, dbeta, accumulate, x.shape[1], groups)
        # before dx, which may overwrite dy; a thread's channels are of one group
        rows, channels, width = x.shape[0] * x.shape[1], x.shape[2], x.shape[2] // groups
        self.summed("group_parameters", rows, channels, 2, x, *given, arrays=(dy,), run=width)
        arguments = (x, dy, gamma, mean, inv_std, out)
        self._groups("group_backward", groups, arguments, (out, x, dy, gamma))

    def _groups(
        self, name: str, groups: int, given: tuple[Any, ...], arrays: tuple[Array, ...]
    ) -> None:
        """Start a kernel with a team for each group of each row, by `arrays`, the output first."""
        out, *_ = arrays
        if not out.size:
            return
        rows, positions, channels = out.shape
        width, each = vectors(channels // groups, *arrays)
        inputs = 1 if name == "group_forward" else 2
        who, per_block = team(positions * channels // groups // each, inputs)
        grid = (ceil(rows * groups, per_block),)
        kernel = f"{name}_{who}_{width}"
        self.launch(kernel, out.dtype.name, grid, (THREADS,), *given, *out.shape, groups)

    def _doubles(self, *tables: Array) -> list[Array]:
        return [self.xp.ascontiguousarray(table, "float64") for table in tables]


def _grouped(out: Array, *inputs: Array) -> bool:
    """Whether the kernels take these: a row of all channels is counted in 32 bits."""
    return native(out, *inputs) and out[:1].size < 1 << 31


def _real(kind: str) -> bool:
    """Whether coefficients of a type are what kernels compute with."""
    return kind in ("float32", "float64")


def _shape(x: Array) -> tuple[int, int]:
    channels = x.shape[-1]
    return x.size // max(channels, 1), channels
