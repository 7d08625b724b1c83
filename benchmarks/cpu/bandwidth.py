"""Bandwidth of a copy, measured: what the rates of kernels that move data are fractions of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def seconds(call: Callable[[], object], repeat: int = 1) -> float:
    """Time one call, as the mean of `repeat` in a row."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def copier(threads: int, out: np.ndarray, x: np.ndarray) -> Callable[[], object]:
    """Return a copy of `x` to `out` by so many threads, as a call."""
    if threads == 1:
        return lambda: np.copyto(out, x)
    pool = ThreadPoolExecutor(threads)
    parts = list(zip(np.array_split(out, threads), np.array_split(x, threads), strict=True))
    return lambda: list(pool.map(lambda part: np.copyto(*part), parts))


def bandwidth(threads: int, size: int = 2**28, runs: int = 7) -> float:
    """B/s that a copy between arrays of `size` B reads and writes together, median of the runs."""
    x, out = np.ones(size // 8), np.ones(size // 8)
    copy = copier(threads, out, x)
    return 2 * size / statistics.median(seconds(copy) for _ in range(runs))
