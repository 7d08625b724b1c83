"""Counter-based random numbers: the same bits on every device, for any number of ranks and threads.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
2011): ten rounds of multiplication turn a 128-bit counter and a 64-bit key into 128 random bits.
There is no state: the counter determines the number.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from pydtnn.kernels.reference.family import Array, KernelFamily, wide

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


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


class Noise(NamedTuple):
    """Random words of the elements of an array: word j of a sample for its element j, see `bits`.

    Parameters
    ----------
    seed, stream, epoch : int
    samples : Array of int64
        The elements of an array are equally many for each of them.
    """

    seed: int
    stream: int
    epoch: int
    samples: Array


class RandomKernels(KernelFamily):
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
