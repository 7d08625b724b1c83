"""Reference kernels of batch, layer, group, root mean square and local response normalisation.

Batch norm has several phases, so that statistics of several shards or ranks can be added between
them: `statistics` reduces, `normalize` applies ``a x + b`` per channel; backward likewise. Sums are
float64: ``sum x^2 / n - mean^2`` then has nine correct digits even if the mean is a thousand times
the deviation. Sums of float64 arrays have two parts each, see `doubled`. Beside 16-bit arrays,
parameters, their gradients and coefficients are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydtnn.kernels.reference import doubled
from pydtnn.kernels.reference.family import Array, KernelFamily, Number, wide


class NormGradient(NamedTuple):
    """Arguments of `NormKernels.backward_coefficients` besides the sums and the pivot."""

    rows: Number
    moments: Array
    gamma: Array
    dgamma: Array
    dbeta: Array
    out: Array
    accumulate: bool


class NormKernels(KernelFamily):
    """Normalisation of ``x (..., C)`` over the rows, or over groups within each row."""

    # -- batch norm: one mean and variance per channel, over all other axes

    def sums_length(self, channels: int, dtype: Any) -> int:
        """Length of the sums of `statistics` for arrays of `dtype`."""
        return 1 + (4 if dtype == "float64" else 2) * channels

    def statistics(self, x: Array, *, out: Array, accumulate: bool = False) -> None:
        """Compute the count, sums and sums of squares of each channel.

        `out` is float64 of length ``1 + 2 C``: the number of rows, ``sum x``, ``sum x^2``; or of
        length ``1 + 4 C``: these followed by second parts of both.
        """
        rows = x.reshape(-1, x.shape[-1]).astype("float64")
        if len(out) > 1 + 2 * x.shape[-1]:
            pivot = rows.sum(axis=0) / max(len(rows), 1)
            rows -= pivot
            offsets, squares = rows.sum(axis=0), (rows * rows).sum(axis=0)
            return self._store_parts(len(rows), pivot, offsets, squares, out, accumulate)
        count = self.xp.asarray([len(rows)], "float64")
        sums = self.xp.concatenate([count, rows.sum(axis=0), (rows * rows).sum(axis=0)])
        self.store(sums, out, accumulate)

    def _store_parts(
        self,
        count: float,
        pivot: Array,
        offsets: Array,
        squares: Array,
        out: Array,
        accumulate: bool = False,
    ) -> None:
        parts = doubled.about_zero(count, pivot, offsets, squares)
        sums = self.xp.concatenate([self.xp.asarray([count], "float64"), *parts])
        self.store(sums, out, accumulate)

    def constant_sums(self, mean: Array, variance: Array, dtype: Any) -> Array:
        """Return sums, as of `statistics`, of one row with these moments."""
        if self.sums_length(len(mean), dtype) > 1 + 2 * len(mean):
            sums = self.xp.empty(self.sums_length(len(mean), dtype), "float64")
            self._store_parts(1, mean, self.xp.zeros_like(mean), variance, sums)
            return sums
        return self.xp.concatenate([self.xp.ones(1, "float64"), mean, variance + mean * mean])

    def moments(self, sums: Array, channels: int) -> tuple[Array, Array]:
        """Return mean and variance (C,) from the sums of `statistics`."""
        count, parts = self.xp.maximum(sums[0], 1), sums[1:].reshape(-1, channels)
        return self._moments(count, *parts)

    def _moments(self, count: Array, total: Array, squares: Array, *rest: Array) -> Any:
        if rest:
            mean, variance = doubled.moments(count, total, squares, *rest)
        else:
            mean = total / count
            variance = squares / count - mean * mean
        return mean, self.xp.maximum(variance, 0)

    def normalize(self, x: Array, scale: Array, shift: Array, *, out: Array) -> None:
        """Compute ``out = x scale + shift`` with a scale and a shift (C,); `out` may be `x`."""
        out[...] = wide(x) * scale + shift

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
        """Compute ``sum dy`` and ``sum dy xhat`` of each channel into `out` (2, C) float64.

        Here ``xhat = (x - mean) inv_std``.
        """
        dy = dy.reshape(-1, dy.shape[-1]).astype("float64")
        xhat = (x.reshape(dy.shape) - mean) * inv_std
        self.store(self.xp.stack([dy.sum(axis=0), (dy * xhat).sum(axis=0)]), out, accumulate)

    def backward_normalize(
        self, x: Array, dy: Array, a: Array, b: Array, c: Array, *, out: Array
    ) -> None:
        """Compute ``out = a dy + b x + c`` with one a, b, c (C,) per channel; `out` may be `dy`.

        With ``g = gamma inv_std`` the gradient of batch norm is of this form:
        ``dx = g (dy - sum dy / n - xhat sum(dy xhat) / n)``.
        """
        out[...] = a * wide(dy) + b * wide(x) + c

    # -- batch norm as a map: the coefficients of `Deferred` arrays

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
        """Compute the map ``factor (x - pivot) + shift`` from the sums of `statistics`.

        `moments` (2, C) float64 receives the mean and 1 / deviation, `out` (3, C) the pivot, which
        is the mean rounded to the type of `out`, the factor and the shift. `sums` are added to
        `collect`, if given.
        """
        if collect is not None:
            collect += sums
        mean, variance = self.moments(sums, len(gamma))
        moments[0], moments[1] = mean, 1 / self.xp.sqrt(variance + epsilon)
        out[0] = mean
        out[1] = factor = gamma * moments[1]
        out[2] = beta - (mean - out[0]) * factor

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
        """Compute `statistics` into `sums`, then `coefficients`."""
        self.statistics(x, out=sums)
        self.coefficients(sums, gamma, beta, epsilon, moments=moments, out=out, collect=collect)

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
        """Compute the map ``dx = a dz + b (x - pivot) + c``, and the gradients of the parameters.

        `sums` (2, C) float64 are ``sum dz`` and ``sum dz (x - pivot)`` over the `rows` of the
        moments, infinitely many if these are constants; `out` (3, C) receives a, b, c.
        """
        (mean, inv_std), (total, product) = moments, sums
        offset = mean - pivot
        gradient = inv_std * (product - offset * total)  # sum dz xhat
        self.store(gradient, dgamma, accumulate)
        self.store(total, dbeta, accumulate)
        a = gamma * inv_std
        b = -a * inv_std * gradient / rows
        out[0], out[1], out[2] = a, b, -a * total / rows - b * offset

    def fold(self, sums: Array, running: Array, indices: Array, momentum: Array) -> None:
        """Update running means and variances from a step's sums, and clear these.

        ``running += momentum (new - running)`` with the unbiased variance; a count of 0 changes
        nothing. If the device's flag `go` is 0, nothing is changed.

        Parameters
        ----------
        sums : Array, float64
            Sums of all layers, each as computed by `statistics`.
        running : Array, shape (2 C,), float64
            Means of the channels of all layers, then their variances.
        indices : Array, shape (3, C) or (5, C), int64
            Positions in `sums` of each channel's count, sum and sum of squares, and of their second
            parts.
        momentum : Array, shape (C,), float64
        """
        xp = self.xp
        count, *parts = sums[indices]
        n = xp.maximum(count, 1)
        mean, variance = self._moments(n, *parts)
        variance = variance * n / xp.maximum(n - 1, 1)
        values = running.reshape(2, -1)
        values += xp.where(count > 0, momentum, 0) * (xp.stack([mean, variance]) - values)
        sums[...] = 0

    # -- layer and group norm: one mean and variance per row and group of channels

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
        """Normalise ``x (N, P, C)`` over the positions and the channels of each group.

        Then scale and shift.

        `mean` and `inv_std` (N, groups) float64 receive the statistics. Layer norm over the last
        axis is the case ``P = 1`` and one group; gamma and beta have shape (C,).
        """
        grouped = x.reshape(*x.shape[:2], groups, x.shape[2] // groups).astype(
            "float64"
        )  # (N, P, G, C / G)
        mean[...] = grouped.mean(axis=(1, 3))
        centred = grouped - mean[:, None, :, None]
        inv_std[...] = 1 / self.xp.sqrt((centred * centred).mean(axis=(1, 3)) + epsilon)
        xhat = (centred * inv_std[:, None, :, None]).reshape(x.shape)
        out[...] = xhat * gamma + beta

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
        """Compute dx into `out`, and the gradients of gamma and beta (C,)."""
        shape = (*x.shape[:2], groups, x.shape[2] // groups)
        rstd = inv_std[:, None, :, None]
        xhat = (x.reshape(shape) - mean[:, None, :, None]) * rstd
        dy64 = dy.astype("float64")
        self.store((dy64 * xhat.reshape(x.shape)).sum(axis=(0, 1)), dgamma, accumulate)
        self.store(dy64.sum(axis=(0, 1)), dbeta, accumulate)
        g = (dy64 * gamma).reshape(shape)
        mean_g = g.mean(axis=(1, 3), keepdims=True)
        mean_gx = (g * xhat).mean(axis=(1, 3), keepdims=True)
        out[...] = ((g - mean_g - xhat * mean_gx) * rstd).reshape(x.shape)

    def rms_forward(
        self, x: Array, gamma: Array, epsilon: float, *, out: Array, inv_rms: Array
    ) -> None:
        """Compute ``out = x gamma / sqrt(mean x^2 + epsilon)`` of each row of ``x (N, C)``.

        `inv_rms` (N, 1) float64 receives the factors of the rows.
        """
        rows = x.astype("float64")
        inv_rms[...] = 1 / self.xp.sqrt((rows * rows).mean(axis=1, keepdims=True) + epsilon)
        out[...] = rows * inv_rms * gamma

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
        xhat, dy = x * inv_rms, dy.astype("float64")
        self.store((dy * xhat).sum(axis=0), dgamma, accumulate)
        g = dy * gamma
        out[...] = (g - xhat * (g * xhat).mean(axis=1, keepdims=True)) * inv_rms

    def local_response_forward(
        self, x: Array, size: int, alpha: float, beta: float, k: float, *, out: Array
    ) -> None:
        """Compute ``out = x / (k + alpha / size sum of x^2)^beta``, a sum over `size` channels.

        These are the channels ``c - size // 2 .. c + (size - 1) // 2`` of those that exist.
        """
        x = wide(x)
        out[...] = x * self._response(x, size, alpha, k) ** -beta

    def local_response_backward(
        self, x: Array, dy: Array, size: int, alpha: float, beta: float, k: float, *, out: Array
    ) -> None:
        """Compute dx into `out`, which may be `dy`.

        With ``d = k + alpha / size sum of x^2``, ``dx = dy d^-beta - 2 alpha beta / size x sum of
        dy x d^(-beta - 1)``; the sum is over the channels whose sums contain this one.
        """
        x, dy = wide(x), wide(dy)
        d = self._response(x, size, alpha, k)
        scaled = dy * d**-beta
        before, after = (size - 1) // 2, size // 2
        shares = self._window(scaled * x / d, before, after)
        out[...] = scaled - 2 * alpha * beta / size * x * shares

    def _response(self, x: Array, size: int, alpha: float, k: float) -> Array:
        return k + alpha / size * self._window(x * x, size // 2, (size - 1) // 2)

    def _window(self, x: Array, before: int, after: int) -> Array:
        """Sum over the channels from `before` before each one to `after` after it."""
        channels = x.shape[-1]
        padded = self.xp.pad(x, ((0, 0),) * (x.ndim - 1) + ((before, after),))
        return sum(padded[..., i : i + channels] for i in range(before + after + 1))
