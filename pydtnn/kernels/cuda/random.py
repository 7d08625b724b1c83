"""Kernels that draw random numbers on a GPU."""

from __future__ import annotations

from math import prod
from numbers import Integral
from typing import Any

from pydtnn.kernels.cuda.layout import THREADS, ceil
from pydtnn.kernels.cuda.own import Own, aligned, native
from pydtnn.kernels.reference import random as reference
from pydtnn.kernels.reference.family import Array

WORD = 0xFFFFFFFF


class Random(Own, reference.Random):
    """Dropout with the same bits as the reference.

    `samples` (N,) int64 are on the device; so may be `epoch`, one int64, which a captured graph
    then reads anew.
    """

    source = "random"

    def dropout(
        self,
        x: Array,
        rate: float,
        seed: int,
        stream: int,
        epoch: int | Array,
        samples: Array,
        *,
        out: Array,
    ) -> None:
        """Zero each element with probability `rate`, multiply the others by ``1 / (1 - rate)``.

        Raises
        ------
        TypeError
            For arrays that are not all of one type, with `out` contiguous: what the reference
            draws, it draws on the host.
        """
        if not native(out, x):
            raise TypeError(
                f"dropout: arrays must be contiguous and of one floating type, not {x.dtype} and "
                f"{out.dtype}"
            )
        if not x.size:
            return
        rows, count = len(x), prod(x.shape[1:])
        x = self.xp.ascontiguousarray(x)
        width = "single" if count % 4 or not aligned(4, x, out) else "wide"
        now: tuple[Any, ...] = (
            (int(epoch) & WORD, None) if isinstance(epoch, Integral) else (0, epoch)
        )
        self.launch(
            f"dropout_{width}",
            out.dtype.name,
            (ceil(rows * ceil(count, 4), THREADS),),
            (THREADS,),
            x,
            self.xp.ascontiguousarray(samples, "int64"),
            *(seed & WORD, stream & WORD, *now, int(rate * 2.0**32), 1 / (1 - rate)),
            *(out, rows, count),
        )
