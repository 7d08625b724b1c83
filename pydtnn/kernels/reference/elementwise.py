"""Reference activations and elementwise arithmetic.

An activation has `forward` and `backward`; backward reads the output if that is sufficient (ReLU,
sigmoid), otherwise the input. `out` may be the first array argument, for in-place computation.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from math import pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from pydtnn.kernels.number_format import NumberFormat
from pydtnn.kernels.reference.family import Array, KernelFamily, wide
from pydtnn.kernels.reference.random import Noise, bits

# The standard normal distribution, for the exact GELU.
#
# The tail falls as ``exp(-t^2 / 2) / (t + c)``. The quotient of both is a smooth function of
# ``s = (t - c) / (t + c)``, and to the last digit a polynomial of degree 22, which interpolates it
# at Chebyshev's points for t from 0 to 39, where the exponential vanishes:
#
#     ``Phi(-t) = exp(-t^2 / 2) / (t + c) P(s)``
#
# References
# ----------
# Shepherd and Laframboise, "Chebyshev approximation of (1 + 2x) exp(x^2) erfc x in 0 <= x <
# infinity", 1981.

OFFSET, MAX_ARGUMENT = 4.0, 39.0

POLYNOMIAL = (
    *(0.75528513041575148, -0.60789664197189177, 0.38713740074221872, -0.18652185795969299),
    *(0.060396574890706599, -0.0075401889656226678, -0.0034796923623715906, 0.0016308184422239424),
    *(1.3334425522449718e-4, -2.3109482030472139e-4, -1.9078730959333091e-6, 3.5144187813104212e-5),
    *(7.1502765135451109e-7, -5.9189050803965809e-6, -6.2517856405123011e-7, 1.0198152807723923e-6),
    *(2.6374251424953201e-7, -1.5426167593457165e-7, -7.6424829783780222e-8, 1.4569488564608778e-8),
    *(1.3938808852558356e-8, 7.7318958086256081e-11, -9.6615755481552986e-10),
)
"""Coefficients of 1, s, s^2, ..."""


def normal(xp: Any, x: Array, factor: Array | float = 1.0) -> tuple[Array, Array, Array]:
    """Return `factor` times the distribution function Phi at `x`, and two factors of the density.

    The exponential itself may be subnormal, and a large multiple of it not: its root is not.
    """
    t = xp.minimum(abs(x), MAX_ARGUMENT)
    root, q = xp.exp(-t * t / 4), 1 / (t + OFFSET)
    s = (t - OFFSET) * q
    series = POLYNOMIAL[-1]
    for coefficient in POLYNOMIAL[-2::-1]:
        series = series * s + coefficient
    tail = q * series * root
    distribution = factor * xp.where(x < 0, tail, 1 - tail * root) * xp.where(x < 0, root, 1)
    return distribution, root / sqrt(2 * pi), root


GELU_FAR, SILU_FAR = 30.0, 1000.0
"""Distance from 0 at which these functions are 0 or the identity in float64."""


class ActivationKernel(NamedTuple):
    """A function, its derivative times dy, and the array that the derivative reads.

    ``forward(xp, x, alpha) -> y`` and ``backward(xp, dy, z, alpha) -> dx`` where ``z`` is the
    output if `reads` is "output", the input if "input". `alpha` is a parameter of the function, for
    those that have one.
    """

    forward: Callable[..., Array]
    backward: Callable[..., Array]
    reads: str


def _sigmoid(xp: Any, x: Array) -> Array:
    # Only that of e^x and e^-x is used that cannot overflow.
    e = xp.exp(-abs(x))
    return xp.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _times_sigmoid(xp: Any, a: Array, x: Array) -> Array:
    # The exponential itself may be subnormal, and a large multiple of it not.
    root = xp.exp(-abs(x) / 2)
    return a * xp.where(x >= 0, 1, root) / (1 + root * root) * xp.where(x >= 0, 1, root)


def _gelu_argument(x: Array) -> Array:
    # tanh form of Hendrycks and Gimpel (2016), section 2: (1 + tanh(u / 2)) / 2 = sigmoid(u), which
    # is accurate where tanh is close to -1.
    return 2 * sqrt(2 / pi) * (x + 0.044715 * x**3)


def _gelu(xp: Any, x: Array, alpha: float) -> Array:
    x = xp.maximum(x, -GELU_FAR)
    return _times_sigmoid(xp, x, _gelu_argument(x))


def _gelu_backward(xp: Any, dy: Array, x: Array, alpha: float) -> Array:
    x = xp.clip(x, -GELU_FAR, GELU_FAR)
    u, du = _gelu_argument(x), 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * x**2)
    return _times_sigmoid(xp, dy * (1 + x * (1 - _sigmoid(xp, u)) * du), u)


def _gelu_exact_backward(xp: Any, dy: Array, x: Array, alpha: float) -> Array:
    distribution, peak, root = normal(xp, x, dy)
    return distribution + dy * xp.clip(x, -MAX_ARGUMENT, MAX_ARGUMENT) * peak * root


def _silu(xp: Any, x: Array, alpha: float) -> Array:
    x = xp.maximum(x, -SILU_FAR)
    return _times_sigmoid(xp, x, x)


def _silu_backward(xp: Any, dy: Array, x: Array, alpha: float) -> Array:
    x = xp.clip(x, -SILU_FAR, SILU_FAR)
    return _times_sigmoid(xp, dy * (1 + x * (1 - _sigmoid(xp, x))), x)


ACTIVATIONS: dict[str, ActivationKernel] = {
    "relu": ActivationKernel(
        lambda xp, x, alpha: xp.maximum(x, 0),
        lambda xp, dy, y, alpha: xp.where(y <= 0, 0, dy),  # dy passes if y is NaN
        "output",
    ),
    "relu6": ActivationKernel(
        lambda xp, x, alpha: xp.clip(x, 0, 6),
        lambda xp, dy, y, alpha: xp.where((y <= 0) | (y >= 6), 0, dy),
        "output",
    ),
    # alpha > 0, so the output has the sign of the input
    "leaky_relu": ActivationKernel(
        lambda xp, x, alpha: xp.where(x > 0, x, alpha * x),
        lambda xp, dy, y, alpha: xp.where(y > 0, dy, alpha * dy),
        "output",
    ),
    "elu": ActivationKernel(
        lambda xp, x, alpha: xp.where(x > 0, x, alpha * xp.expm1(xp.minimum(x, 0))),
        lambda xp, dy, y, alpha: xp.where(y > 0, dy, dy * (y + alpha)),
        "output",
    ),
    "sigmoid": ActivationKernel(
        lambda xp, x, alpha: _sigmoid(xp, x),
        lambda xp, dy, y, alpha: dy * y * (1 - y),
        "output",
    ),
    "tanh": ActivationKernel(
        lambda xp, x, alpha: xp.tanh(x),
        lambda xp, dy, y, alpha: dy * (1 - y * y),
        "output",
    ),
    "arctan": ActivationKernel(
        lambda xp, x, alpha: xp.arctan(x),
        lambda xp, dy, x, alpha: dy / (1 + x * x),
        "input",
    ),
    "log": ActivationKernel(
        lambda xp, x, alpha: xp.log(x),
        lambda xp, dy, x, alpha: dy / x,
        "input",
    ),
    "gelu": ActivationKernel(_gelu, _gelu_backward, "input"),
    "silu": ActivationKernel(_silu, _silu_backward, "input"),
}
"""Activations that all devices have a kernel for."""

FUNCTIONS = ChainMap(
    {
        "hard_sigmoid": ActivationKernel(
            lambda xp, x, alpha: xp.clip(x / 6 + 0.5, 0, 1),
            lambda xp, dy, y, alpha: xp.where((y <= 0) | (y >= 1), 0, dy / 6),
            "output",
        ),
        "hard_swish": ActivationKernel(
            lambda xp, x, alpha: x * xp.clip(x / 6 + 0.5, 0, 1),
            lambda xp, dy, x, alpha: dy * xp.where(x <= -3, 0, xp.where(x >= 3, 1, x / 3 + 0.5)),
            "input",
        ),
        "softplus": ActivationKernel(
            lambda xp, x, alpha: xp.logaddexp(x, 0),
            lambda xp, dy, x, alpha: dy * _sigmoid(xp, x),
            "input",
        ),
        "gelu_exact": ActivationKernel(
            lambda xp, x, alpha: normal(xp, x, xp.maximum(x, -MAX_ARGUMENT))[0],
            _gelu_exact_backward,
            "input",
        ),
    },
    ACTIVATIONS,
)
"""All activations."""


class ElementwiseKernels(KernelFamily):
    """Activations by name, sums of arrays, and softmax over the last axis."""

    def forward(self, name: str, x: Array, *, out: Array, alpha: float = 0.0) -> None:
        """Apply activation `name` to `x`; `out` may be `x`."""
        out[...] = FUNCTIONS[name].forward(self.xp, wide(x), alpha)

    def backward(self, name: str, dy: Array, z: Array, *, out: Array, alpha: float = 0.0) -> None:
        """Multiply `dy` by the derivative.

        `z` is the array specified in `FUNCTIONS`; `out` may be `dy`.
        """
        out[...] = FUNCTIONS[name].backward(self.xp, wide(dy), wide(z), alpha)

    def add(self, a: Array, b: Array, *, out: Array) -> None:
        """Compute ``out = a + b``; `out` may be either."""
        self.xp.add(a, b, out=out)

    def convert(self, x: Array, *, out: Array, accumulate: bool = False) -> None:
        """Copy `x` into `out`, or add it, between any two floating types."""
        with np.errstate(over="ignore"):  # values out of range become infinite, as on any device
            out[...] = out + x if accumulate else x

    def largest(self, x: Array, rows: int, block: int, *, out: Array) -> None:
        """Find the largest magnitudes of blocks, as bits of finite float32.

        Parameters
        ----------
        x : Array (rows, columns) of float32
            Infinite values and NaN count as the largest number.
        rows, block : int
            Rows and columns of a block; those at the end of an axis may be smaller.
        out : Array (ceil(rows / rows of a block), ceil(columns / block)) of int32
        """
        sizes = self.xp.minimum(x.view("int32") & 0x7FFFFFFF, 0x7F7FFFFF)
        sizes = self.xp.pad(sizes, ((0, -len(x) % rows), (0, -x.shape[1] % block)))
        out[...] = sizes.reshape(len(out), rows, -1, block).max(axis=(1, 3))

    def hadamard(self, x: Array, signs: Array, *, out: Array, inverse: bool = False) -> None:
        """Multiply each 16 rows by a Hadamard matrix with random signs.

        ``y = H D x`` with ``H[i, j] = (-1)**popcount(i & j) / 4`` and the diagonal D of `signs`,
        or ``y = D H x``, which is its inverse.

        Parameters
        ----------
        x : Array (16 n, columns) of float32
        signs : Array (16,) of float32
        out : Array
            It may be `x`.
        """
        y = x.reshape(-1, 16, x.shape[1]) * (1 if inverse else signs[:, None])
        for half in (1, 2, 4, 8):
            pair = y.reshape(len(y), -1, 2, half, x.shape[1])
            a, b = pair[:, :, 0], pair[:, :, 1]
            y = self.xp.stack([a + b, a - b], axis=2).reshape(y.shape)
        y *= self.xp.float32(0.25)
        out[...] = (y * (signs[:, None] if inverse else 1)).reshape(x.shape)

    def round(
        self,
        x: Array,
        form: NumberFormat,
        peaks: Array,
        rows: int,
        block: int,
        *,
        out: Array,
        noise: Noise | None = None,
    ) -> None:
        """Round to numbers of a format times scales, to nearest even or at random.

        For a block with the exponent ``p``, the scale is ``2**(p - form.highest)``, so that an
        element of this exponent has the highest of the format; but not so small that units of the
        result are below ``2**-126``. Other scales are given as float32 ``s``: ``x * (1 / s)`` is
        rounded, and multiplied by ``s``; with ``s = 0`` the result is 0. Values out of range become
        the largest number; infinite ones and NaN remain.

        Parameters
        ----------
        x : Array (rows, columns) of float32
        form : NumberFormat
            With 8 bits of exponent, the scale is 1.
        peaks : Array (blocks of rows or 1, blocks of columns or 1) of int32 or float32
            Exponents, ``form.highest`` for the format itself; or scales.
        rows, block : int
            Rows and columns of a block.
        out : Array
            It may be `x`.
        noise : Noise, optional
            Round up with the probability that preserves the expected value, in steps of 2**-24.

        References
        ----------
        Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023,
        section 6.3.
        """
        xp, (mantissa, lowest, highest, _) = self.xp, form.layout
        if len(peaks) > 1:
            peaks = peaks[xp.arange(len(x)) // rows]
        if peaks.shape[1] > 1:
            peaks = peaks[:, xp.arange(x.shape[1]) // block]
        scaled = peaks.dtype.kind == "f"
        finite = xp.isfinite(x)
        size = xp.where(finite, abs(x), xp.float32(0))
        base = xp.full((1, 1), lowest)
        if scaled:
            size = size * xp.where(peaks > 0, 1 / xp.where(peaks > 0, peaks, 1), peaks)
        elif form.exponent < 8:
            base = xp.maximum(peaks + (lowest - highest), mantissa - 126)
        size = size.astype("float64")
        unit = xp.ldexp(1.0, xp.maximum(xp.frexp(size)[1] - 1, base) - mantissa)
        steps = size / unit  # exact
        if noise is None:
            whole = xp.rint(steps)
        else:
            count = x.size // max(len(noise.samples), 1)
            words = bits(noise.seed, noise.stream, noise.epoch, noise.samples, count)
            whole = xp.floor(steps)
            part = (steps - whole) * 2.0**24
            whole += part > xp.asarray(words >> 8).reshape(x.shape)
        largest = xp.ldexp(form.largest / 2.0**lowest, base)
        result = xp.minimum(whole * unit, largest).astype("float32")
        result = xp.copysign(result * peaks if scaled else result, x)
        out[...] = xp.where(finite, result, x)

    def softmax_forward(self, x: Array, *, out: Array) -> None:
        """Compute ``exp(x) / sum exp(x)`` over the last axis, shifted by its maximum."""
        x = wide(x)
        e = self.xp.exp(x - x.max(axis=-1, keepdims=True))
        out[...] = e / e.sum(axis=-1, keepdims=True)

    def softmax_backward(self, dy: Array, y: Array, *, out: Array) -> None:
        """Compute ``dx = y (dy - sum(dy y))`` over the last axis."""
        dy, y = wide(dy), wide(y)
        out[...] = y * (dy - (dy * y).sum(axis=-1, keepdims=True))
