"""Compiled kernels with random numbers."""

from __future__ import annotations

import numpy as np

from pydtnn.kernels.cpu._random import RandomKernels
from pydtnn.kernels.cpu.compiled import Compiled, contiguous, require, supported
from pydtnn.kernels.reference import random as reference
from pydtnn.kernels.reference.family import Array
from pydtnn.kernels.reference.random import WORD


class CpuRandom(Compiled, reference.RandomKernels):
    """Dropout on the CPU, with the same bits as the reference."""

    table = RandomKernels

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
        """Zero each element with probability `rate`, multiply the others by ``1 / (1 - rate)``."""
        require(supported(out, x))
        self.kernels.dropout(
            contiguous(x),
            np.require(samples, np.int64, ["C", "A"]),
            seed & WORD,
            stream & WORD,
            epoch & WORD,
            int(rate * 2.0**32),
            1 / (1 - rate),
            out,
            self.threads,
        )
