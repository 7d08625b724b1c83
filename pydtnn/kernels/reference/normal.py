"""The standard normal distribution, for the exact GELU.

The tail falls as ``exp(-t^2 / 2) / (t + c)``. The quotient of both is a smooth function of ``s = (t
- c) / (t + c)``, and to the last digit a polynomial of degree 22, which interpolates it at
Chebyshev's points for t from 0 to 39, where the exponential vanishes:

    ``Phi(-t) = exp(-t^2 / 2) / (t + c) P(s)``

References
----------
Shepherd and Laframboise, "Chebyshev approximation of (1 + 2x) exp(x^2) erfc x in 0 <= x <
infinity", 1981.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

from pydtnn.kernels.reference.family import Array

OFFSET, LARGEST = 4.0, 39.0
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
    t = xp.minimum(abs(x), LARGEST)
    root, q = xp.exp(-t * t / 4), 1 / (t + OFFSET)
    s = (t - OFFSET) * q
    series = POLYNOMIAL[-1]
    for coefficient in POLYNOMIAL[-2::-1]:
        series = series * s + coefficient
    tail = q * series * root
    distribution = factor * xp.where(x < 0, tail, 1 - tail * root) * xp.where(x < 0, root, 1)
    return distribution, root / sqrt(2 * pi), root
