"""Kernels that draw random numbers on a GPU."""

from __future__ import annotations

from math import prod

from pydtnn.kernels.cuda.layout import MAX_BLOCKS, THREADS, ceil
from pydtnn.kernels.cuda.module import CudaKernels, native, number, vectors
from pydtnn.kernels.reference import random as reference
from pydtnn.kernels.reference.family import Array, Number

WORD = 0xFFFFFFFF

FLIGHT = 2
"""Vectors of a thread, as in random.cu."""


class CudaRandom(CudaKernels, reference.RandomKernels):
    """Dropout with the same bits as the reference.

    `samples` (N,) int64 are on the device; so may be `epoch`, one float64, which a captured graph
    then reads anew.
    """

    source = "random"

    def dropout(
        self,
        x: Array,
        rate: float,
        seed: int,
        stream: int,
        epoch: Number,
        samples: Array,
        *,
        out: Array,
    ) -> None:
        """Zero each element with probability `rate`, multiply the others by ``1 / (1 - rate)``.

        Raises
        ------
        TypeError
            For arrays that are not all of one type, with `out` contiguous, and samples of 2^30
            elements and more: what the reference draws, it draws on the host.
        """
        rows, count = len(x), prod(x.shape[1:])
        if not (native(out, x) and count < 1 << 30):
            raise TypeError(
                f"dropout: arrays must be contiguous and of one floating type, with fewer than "
                f"2^30 elements per sample, not {x.dtype} {x.shape} and {out.dtype}"
            )
        if not x.size:
            return
        x = self.xp.ascontiguousarray(x)
        width, each = vectors(count, out, x)
        each = max(each, 4)
        across = min(1 << max(ceil(count, each * FLIGHT) - 1, 0).bit_length(), THREADS)
        down = THREADS // across
        grid = (ceil(count, each * FLIGHT * across), min(ceil(rows, down), MAX_BLOCKS))
        now, now_at = number(epoch)
        self.launch(
            *(f"dropout_{width}", out.dtype.name, grid, (across, down)),
            *(x, self.xp.ascontiguousarray(samples, "int64")),
            *(seed & WORD, stream & WORD, float(int(now) & WORD), now_at),
            *(int(rate * 2.0**32), 1 / (1 - rate), out, rows, count),
        )
