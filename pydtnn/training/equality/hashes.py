"""Hashes of a rank's arrays after the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from pydtnn.comm.arrays import on_host, to_host
from pydtnn.kernels.reference.family import Array
from pydtnn.utils import clock

SHARE = 0.004
"""Part of the time of training that hashes after each step may take."""

SAMPLES = 6
"""Steps whose times are measured before the number of arrays hashed per step is chosen."""

MOST = 256
"""Hashes of each array that are kept between two comparisons."""


def hash_all(arrays: Sequence[Array]) -> np.ndarray:
    """Return the hashes (uint64) of contiguous arrays; those of a device are copied to the host."""
    from pydtnn.kernels.cpu._hash import hash_arrays

    hashes = np.empty(len(arrays), np.uint64)
    hash_arrays([array if on_host(array) else to_host(array) for array in arrays], hashes)
    return hashes


class Hashes:
    """Hashes of arrays after each step since the last comparison.

    After each step every array is hashed, or if that takes more than `SHARE` of the time of a step,
    every `spread`-th array in turn. Arrays of a device are hashed for comparisons only.

    Parameters
    ----------
    arrays : sequence of Array
    every : int
        Steps between comparisons.

    Attributes
    ----------
    spread : int
        Steps in which every array is hashed once; 0: none between comparisons.
    """

    def __init__(self, arrays: Sequence[Array], every: int) -> None:
        self._arrays = [*arrays]
        self._every = every
        self._records: list[tuple[int, int, int, np.ndarray]] = []
        self.spread = 0
        self.set_spread(1 if all(map(on_host, arrays)) else 0)

    def set_spread(self, spread: int) -> None:
        """Hash every array once in this number of steps."""
        spread = max(spread, ceil(self._every / MOST)) if spread else 0
        self.spread = 0 if spread >= self._every else spread
        self._turns = [self._arrays[turn :: self.spread] for turn in range(self.spread)]

    def after(self, step: int) -> None:
        """Hash the arrays whose turn it is."""
        if self.spread:
            turn = step % self.spread
            self._records.append((step, turn, self.spread, hash_all(self._turns[turn])))

    def complete(self, step: int) -> np.ndarray:
        """Hash all arrays, and return the hashes."""
        hashes = hash_all(self._arrays)
        self._records.append((step, 0, 1, hashes))
        return hashes

    def forget(self) -> None:
        """Keep the last hashes only, which were equal to those of the other ranks."""
        del self._records[:-1]

    def of(self, index: int) -> dict[int, int]:
        """Return the hashes of an array by step, in the order of the steps."""
        return {
            step: int(hashes[index // spread])
            for step, turn, spread, hashes in self._records
            if index % spread == turn
        }


class Pace:
    """The choice of `Hashes.spread` from the times of the first steps."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._hashes: list[float] = []
        self._last: float | None = None
        self.chosen = False

    def measure(self, hashes: Hashes, step: int) -> bool:
        """Hash after a step; return whether enough steps have been measured for `spread`."""
        begin = clock.now()
        hashes.after(step)
        end = clock.now()
        if self._last is not None:
            self._steps.append(begin - self._last)
            self._hashes.append((end - begin) * hashes.spread)
        self._last = end
        return len(self._steps) >= SAMPLES

    def pause(self) -> None:
        """Do not count the time until the next step."""
        self._last = None

    def spread(self) -> int:
        """Return in how many steps arrays can be hashed within `SHARE` of their time."""
        least = SHARE * np.median(self._steps)
        return max(1, ceil(np.median(self._hashes) / least)) if least else 1
