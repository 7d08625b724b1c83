"""Counter-based random numbers: the same bits on every device, for any number of ranks and threads.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
2011): ten rounds of multiplication turn a 128-bit counter and a 64-bit key into 128 random bits.
There is no state: the counter determines the number.
"""

from __future__ import annotations

import hashlib
from math import pi, sqrt
from typing import Any

import numpy as np

from pydtnn.kernels.reference.family import Array, Family, wide

OFFSET, LARGEST = 4.0, 39.0
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


# 64-bit hashes of arrays: XXH64, by which ranks compare arrays without sending them.
#
# Y. Collet, "xxHash fast digest algorithm", version 0.1.1, section "XXH64": not cryptographic, but
# every bit of the input affects every bit of the result. Four sums are computed in an interleaved
# order, so that their multiplications overlap; `pydtnn.kernels.cpu._hash` computes the same number
# at about the speed of memory.

PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
WORD = (1 << 64) - 1


def hash64(array: np.ndarray) -> int:
    """Return the XXH64 hash, with seed 0, of the bytes of an array in C order.

    The reference of the tests: about a microsecond per byte.
    """
    data = array.tobytes()
    p1, p2, p3, p4, p5 = PRIMES
    rest = 0
    if len(data) >= 32:
        sums = [(p1 + p2) & WORD, p2, 0, -p1 & WORD]
        for rest in range(0, len(data) - 31, 32):
            for i in range(4):
                sums[i] = _round(sums[i], _read(data, rest + 8 * i, 8))
        rest += 32
        value = sum(_rotate(s, n) for s, n in zip(sums, (1, 7, 12, 18), strict=True)) & WORD
        for s in sums:
            value = ((value ^ _round(0, s)) * p1 + p4) & WORD
    else:
        value = p5
    value = (value + len(data)) & WORD
    while rest + 8 <= len(data):
        value = (_rotate(value ^ _round(0, _read(data, rest, 8)), 27) * p1 + p4) & WORD
        rest += 8
    if rest + 4 <= len(data):
        value = (_rotate(value ^ (_read(data, rest, 4) * p1 & WORD), 23) * p2 + p3) & WORD
        rest += 4
    for byte in data[rest:]:
        value = _rotate(value ^ (byte * p5 & WORD), 11) * p1 & WORD
    value = (value ^ value >> 33) * p2 & WORD
    value = (value ^ value >> 29) * p3 & WORD
    return value ^ value >> 32


def _round(total: int, word: int) -> int:
    """Add eight bytes to one of the four sums."""
    return _rotate((total + word * PRIMES[1]) & WORD, 31) * PRIMES[0] & WORD


def _rotate(value: int, bits: int) -> int:
    return (value << bits | value >> 64 - bits) & WORD


def _read(data: bytes, start: int, size: int) -> int:
    return int.from_bytes(data[start : start + size], "little")


MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def stream(name: str) -> int:
    """Hash a name to 32 bits, the same in every process: a key for random numbers."""
    return int.from_bytes(hashlib.blake2s(name.encode(), digest_size=4).digest(), "little")


def philox4x32(counter: Array, key: Array) -> Array:
    """Ten rounds of Philox4x32.

    Parameters
    ----------
    counter : ndarray of uint32, shape (n, 4)
        Any array module whose integers wrap.
    key : ndarray of uint32, shape (2,) or (n, 2)

    Returns
    -------
    ndarray of uint32, shape (n, 4)
    """
    c = [counter[..., i].astype("uint64") for i in range(4)]
    k = [key[..., i].astype("uint64") for i in range(2)]
    low = 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c[0] * MULTIPLIERS[0], c[2] * MULTIPLIERS[1]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & low, (p0 >> 32) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + WEYL[0]) & low, (k[1] + WEYL[1]) & low]
    return np.stack(c, axis=-1).astype("uint32")  # CuPy arrays implement np.stack


def bits(seed: int, stream: int, epoch: int, samples: Array, count: int) -> Array:
    """Random bits of each sample: (n, count) uint32, keyed by (seed, stream, epoch, sample).

    Counter: word index / 4, sample (64 bits), epoch. Key: seed, stream. Word ``j`` of a sample is
    word ``j % 4`` of block ``j // 4``; seed, stream and epoch count modulo 2**32.
    """
    blocks = -(-count // 4)
    samples = np.asarray(samples).astype("uint64")
    counter = np.empty((len(samples), blocks, 4), "uint32")
    counter[..., 0] = np.arange(blocks, dtype="uint32")
    counter[..., 1] = (samples & 0xFFFFFFFF)[:, None]
    counter[..., 2] = (samples >> 32)[:, None]
    counter[..., 3] = epoch & 0xFFFFFFFF
    key = np.array([seed & 0xFFFFFFFF, stream], "uint32")
    return philox4x32(counter, key).reshape(len(samples), 4 * blocks)[:, :count]


def uniform(seed: int, stream: int, epoch: int, samples: Array, count: int) -> Array:
    """Uniform numbers in [0, 1) of each sample: (n, count) float64 multiples of 2**-32."""
    return bits(seed, stream, epoch, samples, count) * 2.0**-32


class Random(Family):
    """Kernels with random numbers: dropout."""

    def dropout(
        self,
        x: Array,
        rate: float,
        seed: int,
        stream: int,
        epoch: int,
        samples: Array,
        *,
        out: Array,
    ) -> None:
        """Zero each element with probability `rate`, multiply the others by ``1 / (1 - rate)``.

        Element ``j`` of sample ``samples[i]`` (its features in C order) is kept if its `bits` word
        is at least ``floor(rate 2**32)``. The same call on `dy` is the backward pass. `out` may be
        `x`. Srivastava et al. 2014.
        """
        words = bits(seed, stream, epoch, samples, max(x[:1].size, 1) if len(x) else 0)
        keep = (words >= np.uint32(int(rate * 2.0**32))).reshape(x.shape)
        out[...] = self.xp.where(self.xp.asarray(keep), wide(x) * (1 / (1 - rate)), 0)
