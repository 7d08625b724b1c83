"""Compression of gradients to 8-bit integers or signs, with one scale per block.

Blocks do not cross parameters, as magnitudes of gradients differ between parameters.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pydtnn.parallel.compression.compressor import Compressor, Context, Parts
from pydtnn.utils.validate import check_int

LEVELS = 127


class BlockRanges(NamedTuple):
    """Offsets and lengths of blocks."""

    starts: np.ndarray
    lengths: np.ndarray


@lru_cache(maxsize=1024)
def blocks(sizes: tuple[int, ...], block: int) -> BlockRanges:
    """Split parameters of these sizes into blocks; the last one of each may be shorter."""
    lengths = [min(block, size - begin) for size in sizes for begin in range(0, size, block)]
    return BlockRanges(np.cumsum([0, *lengths[:-1]]), np.array(lengths))


def int8(*, block: int = 512, feedback: bool = False, seed: int = 0) -> Compressor:
    """Send ``x / (scale / 127)`` as int8, rounded up or down at random, without bias.

    The scale is the largest ``|x|`` of a block, and is sent, too. Probabilities have a resolution
    of ``2**-16``, so ``E[restored] = x`` within ``2**-17`` of a level. A block with infinite values
    or NaN is restored to values that are not finite, as its scale is not.

    Parameters
    ----------
    block : int
        Maximum number of neighbours with a common scale.
    feedback, seed
        See `Compressor`.

    References
    ----------
    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
    NeurIPS 2017, section 3.1 (with the largest value as the norm, section 4).
    """
    block = check_int("int8", "block", block, at_least=1)

    def compress(x: np.ndarray, context: Context) -> Parts:
        starts, lengths = blocks(context.sizes, block)
        scales = np.maximum.reduceat(np.abs(x), starts)
        levels = x / np.repeat(np.where(scales == 0, 1, scales), lengths)
        levels *= LEVELS
        dither = context.random.bit_generator.random_raw(-(-x.size // 4)).view(np.uint16)[: x.size]
        levels += dither.astype(x.dtype) * x.dtype.type(2.0**-16) + x.dtype.type(2.0**-17)
        np.floor(levels, out=levels)
        np.clip(levels, -LEVELS, LEVELS, out=levels)  # the sum may have been rounded up
        return levels.astype(np.int8), scales

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        levels, scales = parts
        lengths = blocks(context.sizes, block).lengths
        values = levels * np.repeat(scales / LEVELS, lengths)
        small = scales < LEVELS * np.finfo(scales.dtype).tiny  # subnormal if divided: imprecise
        if small.any():
            values = np.where(np.repeat(small, lengths), _small(levels, scales, lengths), values)
        out += values

    return Compressor(compress, restore, feedback=feedback, seed=seed)


def _small(levels: np.ndarray, scales: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return restored values, divided last: exact for small scales, may overflow for others."""
    return levels * np.repeat(scales, lengths) / scales.dtype.type(LEVELS)


def sign(
    *, block: int = 128, feedback: bool = True, served: bool = False, seed: int = 0
) -> Compressor:
    """Send the sign of each value as one bit, and the mean of ``|x|`` of each block.

    0 counts as positive. A block with infinite values or NaN is restored to infinite values or NaN.

    Parameters
    ----------
    block : int
        Maximum number of neighbours with a common scale.
    feedback, served, seed
        See `Compressor`. Without feedback, updates do not follow the gradient, and training may
        not converge (Karimireddy et al. 2019, section 3).

    References
    ----------
    Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
    Distributed Training of Speech DNNs", Interspeech 2014; Karimireddy et al., "Error Feedback
    Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, algorithm 1. Served: Tang et
    al., "DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
    Compression", ICML 2019, algorithm 1.
    """
    block = check_int("sign", "block", block, at_least=1)
    bits = np.unpackbits(np.arange(256, dtype="uint8")[:, None], axis=1)
    signs = 2 * bits.astype("int8") - 1  # of each byte, (256, 8)
    tables = {np.dtype(name): signs.astype(name) for name in ("float32", "float64")}

    def compress(x: np.ndarray, context: Context) -> Parts:
        starts, lengths = blocks(context.sizes, block)
        sizes = np.abs(x)
        scales = np.add.reduceat(sizes, starts, dtype="float64") / lengths
        if not np.isfinite(scales).all():  # a sum of float64 may overflow where its mean does not
            scales = np.add.reduceat(sizes / np.repeat(lengths, lengths), starts)
        return np.packbits(x >= 0), scales.astype(x.dtype)

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        values = np.take(tables[out.dtype], parts[0], axis=0).reshape(-1)[: out.size]
        values *= np.repeat(parts[1], blocks(context.sizes, block).lengths)
        out += values

    return Compressor(compress, restore, feedback=feedback, served=served, seed=seed)


def sign_vote(*, momentum: float = 0.0) -> Compressor:
    """Replace each gradient by the sign that most ranks have: -1, 0 or 1.

    Ranks send the signs of their gradients, or of their momentum, five in a byte. An optimizer
    without momentum then changes each parameter by lr, or not at all where as many ranks vote for
    as against: use the small learning rate of Adam. A gradient of 0, such as that of a rank without
    samples, is no vote. A gradient that is infinite or NaN makes five sums NaN.

    Parameters
    ----------
    momentum : float
        Of each rank's gradients, before their signs (Signum), in [0, 1).

    References
    ----------
    Bernstein et al., "signSGD: Compressed Optimisation for Non-Convex Problems", ICML 2018,
    algorithms 1 to 3 with majority vote.
    """
    places = 3 ** np.arange(5)
    digits = np.arange(256)[:, None] // places % 3 - 1.0  # of each byte, (256, 5)
    digits[243:] = np.nan

    def compress(x: np.ndarray, context: Context) -> Parts:
        votes = np.zeros((-(-x.size // 5), 5))
        votes.reshape(-1)[: x.size] = np.where(np.isfinite(x), np.sign(x), np.nan)
        sums = (votes + 1) @ places
        return (np.where(np.isnan(sums), 255, sums).astype(np.uint8),)

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        out += digits[parts[0]].reshape(-1)[: out.size]

    return Compressor(compress, restore, momentum=momentum, served=True)
