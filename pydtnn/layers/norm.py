"""Normalisation over the batch, over each sample, and over groups of channels."""

from __future__ import annotations

from math import inf, prod
from typing import Any

import numpy as np

from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers.base import RESULTS, Layer, Saved, Shape, StepContext
from pydtnn.layers.communicating import TwoPhase
from pydtnn.layers.cost import Cost, per_element
from pydtnn.layers.recomputed import Recomputed, Recomputing
from pydtnn.layers.repeatable import Repeatable
from pydtnn.utils.validate import check_float, check_int


class LocalResponseNorm(Layer):
    """``x / (k + alpha / size sum of x^2)^beta``, the sum over `size` neighbouring channels.

    These are channels ``c - size // 2 .. c + (size - 1) // 2``, of which those that do not exist
    count as zeros, as in PyTorch. The paper's `alpha` is the one here divided by `size`.

    Parameters
    ----------
    size : int
        Channels of a window.
    alpha, beta : float
    k : float
        Positive.

    Notes
    -----
    Input and output ``(N, ..., C)``.

    References
    ----------
    Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural
    networks", 2012, section 3.3.
    """

    saves = ("input",)
    may_overwrite = ("dy",)
    new_results = RESULTS
    supports = ("16 bits",)

    def __init__(
        self,
        size: int,
        *,
        alpha: float = 1e-4,
        beta: float = 0.75,
        k: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.size = check_int(who, "size", size, at_least=1)
        self.alpha = check_float(who, "alpha", alpha, at_least=0)
        self.beta = check_float(who, "beta", beta)
        self.k = check_float(who, "k", k, above=0)

    def build(self, *shapes: Shape) -> Shape:
        """Check that there are channels."""
        return self.single(shapes, axes=1)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array, Saved]:
        """Divide by the power of the mean square."""
        (x,) = xs
        y = self.empty(len(x), self.output_shape)
        self.backend.norm.local_response_forward(x, self.size, self.alpha, self.beta, self.k, out=y)
        return y, x

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Differentiate through the divisors of all windows that contain a channel."""
        dx = self.gradient_like(dy)
        self.backend.norm.local_response_backward(
            saved, dy, self.size, self.alpha, self.beta, self.k, out=dx
        )
        return dx

    def cost(self, batch: int) -> Cost:
        """Squares, sums over windows, a power and a product; backward two of these sums.

        A power is a logarithm, a product and an exponential.
        """
        divisor = 1 + self.size - 1 + 2 + 3  # square, sum, scale and k, power
        backward = divisor + 3 + self.size - 1 + 3
        return per_element(self.elements(batch), self.dtype.itemsize, divisor + 1, backward)


FLOAT64 = np.dtype("float64")
"""Type of statistics; a type made of its name in every step takes time."""


class BatchNorm(TwoPhase, Repeatable, Layer):
    """``y = gamma (x - mean) / sqrt(var + epsilon) + beta`` per channel, over all other axes.

    In training, mean and variance are computed over the batch; otherwise the running values are
    used, which are updated once per step with weight `momentum` from the statistics of the whole
    step (with the unbiased variance).

    Parameters
    ----------
    momentum : float
        Weight of a new step in the running statistics, in (0, 1].
    epsilon : float

    Notes
    -----
    Input and output ``(N, ..., C)``, parameters ``gamma (C,)`` and ``beta (C,)``.

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, algorithm 1.
    """

    saves: tuple[str, ...] = ("input",)
    may_overwrite: tuple[str, ...] = ("dy",)
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits",)

    def __init__(
        self, *, momentum: float = 0.1, epsilon: float = 1e-5, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.momentum = check_float(who, "momentum", momentum, above=0, at_most=1)
        self.epsilon = check_float(who, "epsilon", epsilon, above=0)

    def build(self, *shapes: Shape) -> Shape:
        """Declare gamma and beta (C,) and the running statistics."""
        shape = self.single(shapes, axes=1)
        channels = shape[-1]
        self.gamma = self.parameter("gamma", (channels,), "ones", decay=False)
        self.beta = self.parameter("beta", (channels,), "zeros", decay=False)
        self.running = self.statistic(channels, self.momentum)
        return shape

    def forward_sums(self, *xs: Array, context: StepContext) -> Array:
        """Return the sums of `NormKernels.statistics`."""
        (x,) = xs
        length = self.backend.norm.sums_length(x.shape[-1], self.dtype)
        sums = self.backend.empty((length,), "float64")
        self.backend.norm.statistics(x, out=sums)
        return sums

    def given_sums(self, context: StepContext, total: Array | None) -> tuple[Array, Number] | None:
        """Return sums, as of `NormKernels.statistics`, from outside the batch, and their rows.

        Outside training, and for a frozen layer, these represent the running values with infinitely
        many rows, so that backward treats them as constants. In training they are the total of all
        shards, if there is one.
        """
        if self.running.frozen or not context.training:
            mean, variance = self.running.mean, self.running.variance
            return self.backend.norm.constant_sums(mean, variance, self.dtype), inf
        if total is None:
            return None
        if not context.recomputing:
            self.running.add_total(self.name, total)
        return total, np.maximum(total[0], 1.0)

    def own_sums(self, x: Array, context: StepContext) -> tuple[Array, Number]:
        """Return the sums and number of rows of the batch; add the sums to those of the step."""
        sums = self.forward_sums(x, context=context)
        if not context.recomputing:
            self.running.sums += sums
        return sums, rows(x)

    def forward(
        self, *xs: Array, context: StepContext, total: Array | None = None
    ) -> tuple[Array, Saved]:
        """Normalise with the batch's statistics in training, with the running ones otherwise."""
        (x,) = xs
        sums, n = self.given_sums(context, total) or self.own_sums(x, context)
        mean, variance = self.backend.norm.moments(sums, x.shape[-1])
        return self._normalize(x, n, mean, 1 / np.sqrt(variance + self.epsilon))

    def kept(self, saved: Saved) -> Any:
        """Return the number of rows, the mean and 1 / deviation."""
        return saved[1:]

    def forward_again(self, *xs: Array, context: StepContext, kept: Any) -> tuple[Array, Saved]:
        """Normalise with the kept mean and deviation."""
        return self._normalize(*xs, *kept)

    def _normalize(self, x: Array, n: Number, mean: Array, inv_std: Array) -> tuple[Array, Saved]:
        scale = self.gamma.value * inv_std
        shift = self.beta.value - mean * scale
        y = self.output_like(x)
        self.backend.norm.normalize(x, scale, shift, out=y)  # float64 maps do not cancel
        return y, (x, n, mean, inv_std)

    def backward_sums(self, dy: Array, saved: Saved) -> tuple[Any, Array]:
        """Differentiate gamma and beta: ``dbeta = sum dy``, ``dgamma = sum dy xhat``."""
        x, _, mean, inv_std = saved
        sums = self.backend.empty((2, x.shape[-1]), "float64")
        self.backend.norm.backward_statistics(x, dy, mean, inv_std, out=sums)
        dbeta, dgamma = sums
        self.beta.store_grad(dbeta)
        self.gamma.store_grad(dgamma)
        return (dy, sums), sums.reshape(-1)  # (2 C,)

    def backward_rest(self, needed: Any, saved: Saved, total: Array | None = None) -> Array | None:
        """Differentiate through the mean and variance of the batch, or of all shards.

        With ``n`` rows, ``dx = gamma inv_std (dy - dbeta / n - xhat dgamma / n)``.
        Running statistics are constants: ``n`` is infinite.
        """
        if not self.needs_dx:
            return None
        (dy, own), (x, n, mean, inv_std) = needed, saved
        dbeta, dgamma = own if total is None else total.reshape(own.shape)
        a = self.gamma.value * inv_std  # dx = a dy + b x + c, written out per channel
        b = -a * inv_std * dgamma / n
        c = -a * dbeta / n - b * mean
        dx = self.gradient_like(dy)
        self.backend.norm.backward_normalize(x, dy, a, b, c, out=dx)
        return dx

    def cost(self, batch: int) -> Cost:
        """Sums of x and x^2 (3 per element), the map (2); two sums (5), the map of dx (4).

        The map is a second sweep, which frozen running statistics make the only one.
        """
        elements, itemsize = batch * prod(self.output_shape), self.dtype.itemsize
        sums = not self.running.frozen
        return Cost(
            elements * (2 + 3 * sums),
            elements * (5 + 4 * self.needs_dx),
            elements * itemsize * (2 + sums),
            elements * itemsize * (2 + 3 * self.needs_dx),
        )


def rows(x: Any) -> int:
    """Number of rows in the mean over `x` (N, ..., C), at least one.

    >>> rows(np.zeros((2, 3, 4, 5)))
    24
    """
    return max(prod(x.shape[:-1]), 1)


class GroupNorm(Recomputing, Layer):
    """Normalise each sample over its positions and each group of channels, then scale and shift.

    Parameters
    ----------
    groups : int
        Must divide the channels.
    epsilon : float

    Notes
    -----
    Input and output ``(N, ..., C)``, parameters ``gamma (C,)`` and ``beta (C,)``.

    References
    ----------
    Wu and He, "Group Normalization", 2018, section 3.
    """

    saves: tuple[str, ...] = ("input",)
    may_overwrite: tuple[str, ...] = ("dy",)
    new_results = RESULTS
    supports: tuple[str, ...] = ("16 bits", "recomputing", "replay")

    def __init__(self, groups: int, *, epsilon: float = 1e-5, name: str | None = None) -> None:
        super().__init__(name=name)
        who = type(self).__name__
        self.groups = check_int(who, "groups", groups, at_least=1)
        self.epsilon = check_float(who, "epsilon", epsilon, above=0)

    def build(self, *shapes: Shape) -> Shape:
        """Declare gamma and beta (C,)."""
        shape = self.single(shapes, axes=1)
        if shape[-1] % self.groups:
            raise self.fail(f"channels must be divisible by groups={self.groups}, got {shape[-1]}")
        self.row_shape: Shape = (-1, prod(shape[:-1]), shape[-1])  # (N, P, C)
        self._declare(self.row_shape[-1])
        return shape

    def _declare(self, channels: int) -> None:
        self.gamma = self.parameter("gamma", (channels,), "ones", decay=False)
        self.beta = self.parameter("beta", (channels,), "zeros", decay=False)

    def forward(self, *xs: Array, context: StepContext) -> tuple[Array | Recomputed, Saved]:
        """Normalise, scale and shift."""
        (x,) = xs
        y, saved = self._normalize(x)
        if self.recomputed and context.differentiable:
            return Recomputed(y, lambda: self._normalize(x)[0]), saved
        return y, saved

    def _normalize(self, x: Array) -> tuple[Array, Saved]:
        rows = x.reshape(self.row_shape)
        y = self.backend.empty(rows.shape, rows.dtype)
        mean, inv_std = (self.backend.empty((len(rows), self.groups), "float64") for _ in range(2))
        self.backend.norm.group_forward(
            rows,
            self.gamma.value,
            self.beta.value,
            self.groups,
            self.epsilon,
            out=y,
            mean=mean,
            inv_std=inv_std,
        )
        return y.reshape(x.shape), (rows, mean, inv_std)

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Differentiate through each group's own mean and variance."""
        rows, mean, inv_std = saved
        dx = self.gradient_like(dy)
        self.backend.norm.group_backward(
            rows,
            dy.reshape(rows.shape),
            self.gamma.value,
            self.groups,
            mean,
            inv_std,
            out=dx.reshape(rows.shape),
            dgamma=self.gamma.grad,
            dbeta=self.beta.grad,
            accumulate=self.gamma.accumulate,
        )
        return dx

    def cost(self, batch: int) -> Cost:
        """As `BatchNorm`, but a sample is read again from the cache."""
        return self.with_readers(per_element(self.elements(batch), self.dtype.itemsize, 5, 9))


class LayerNorm(GroupNorm):
    """Normalise each row over its last axes, then scale and shift each element.

    Parameters
    ----------
    axes : int
        Number of trailing axes that are normalised together; gamma and beta have one entry for
        each of their elements.
    epsilon : float

    References
    ----------
    Ba, Kiros and Hinton, "Layer Normalization", 2016, equation 4.
    """

    def __init__(self, *, axes: int = 1, epsilon: float = 1e-5, name: str | None = None) -> None:
        super().__init__(1, epsilon=epsilon, name=name)
        self.axes = check_int("LayerNorm", "axes", axes, at_least=1)

    def build(self, *shapes: Shape) -> Shape:
        """Declare gamma and beta, flat over the normalised axes."""
        shape = self.single(shapes, axes=1)
        if self.axes > len(shape):
            raise self.fail(f"axes must be at most those of the input {shape}, got {self.axes}")
        self.row_shape = (-1, 1, prod(shape[-self.axes :]))  # (N * leading axes, 1, elements)
        self._declare(self.row_shape[-1])
        return shape


class RMSNorm(GroupNorm):
    """``y = gamma x / sqrt(mean x^2 + epsilon)`` of each row, over the last axis.

    Parameters
    ----------
    epsilon : float

    Notes
    -----
    Input and output ``(N, ..., C)``, parameter ``gamma (C,)``.

    References
    ----------
    Zhang and Sennrich, "Root mean square layer normalization", NeurIPS 2019, equation 4.
    """

    supports = ("16 bits", "recomputing", "replay")

    def __init__(self, *, epsilon: float = 1e-5, name: str | None = None) -> None:
        super().__init__(1, epsilon=epsilon, name=name)

    def build(self, *shapes: Shape) -> Shape:
        """Declare gamma (C,)."""
        shape = self.single(shapes, axes=1)
        self.row_shape = (-1, shape[-1])  # (N * leading axes, C)
        self.gamma = self.parameter("gamma", shape[-1:], "ones", decay=False)
        return shape

    def _normalize(self, x: Array) -> tuple[Array, Saved]:
        rows = x.reshape(self.row_shape)
        y = self.backend.empty(rows.shape, rows.dtype)
        inv_rms = self.backend.empty((len(rows), 1), "float64")
        gamma = self.gamma.value
        self.backend.norm.rms_forward(rows, gamma, self.epsilon, out=y, inv_rms=inv_rms)
        return y.reshape(x.shape), (rows, inv_rms)

    def backward(self, dy: Array, saved: Saved) -> Array:
        """Differentiate through each row's own mean square."""
        rows, inv_rms = saved
        dx = self.gradient_like(dy)
        self.backend.norm.rms_backward(
            rows,
            dy.reshape(rows.shape),
            self.gamma.value,
            inv_rms,
            out=dx.reshape(rows.shape),
            dgamma=self.gamma.grad,
            accumulate=self.gamma.accumulate,
        )
        return dx

    def cost(self, batch: int) -> Cost:
        """A sum of squares (2), two factors; two sums (5), a difference and two factors (3)."""
        return self.with_readers(per_element(self.elements(batch), self.dtype.itemsize, 4, 8))
