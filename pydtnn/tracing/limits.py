"""Limits of the machine to which layers are compared: operations and bytes per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pydtnn.utils.threads import limit_blas_threads

SIZE = 768
"""Rows and columns of the matrices."""

LENGTH = 64 << 20
"""Bytes that are copied, more than caches hold, in B."""

REPEATS = 3
"""Measurements, of which the fastest counts."""


def measure_limits(threads: int, dtype: str = "float32") -> dict[str, float]:
    """Measure what this machine achieves with a number of threads; takes about 0.2 s.

    Each thread multiplies matrices of its own by the BLAS of NumPy, then copies its part of an
    array. Call it on all ranks at the same time: ranks on one host share its memory.

    Parameters
    ----------
    threads : int
        Threads of a rank.
    dtype : str, default "float32"

    Returns
    -------
    dict
        "flops_per_second" in flop/s, "bytes_per_second" in B/s, read and written bytes.
    """
    random = np.random.default_rng(0)
    a, b = random.random((2, SIZE, SIZE)).astype(dtype)
    products = np.empty((threads, SIZE, SIZE), dtype)
    source = np.ones((threads, LENGTH // threads), "u1")
    target = np.ones_like(source)
    with limit_blas_threads(1), ThreadPoolExecutor(threads) as pool:
        multiplied = _fastest(pool, threads, lambda i: np.matmul(a, b, out=products[i]))
        copied = _fastest(pool, threads, lambda i: np.copyto(target[i], source[i]))
    return {
        "flops_per_second": 2 * SIZE**3 * threads / multiplied,
        "bytes_per_second": 2 * source.nbytes / copied,
    }


def _fastest(pool: ThreadPoolExecutor, threads: int, work: Callable[[int], object]) -> float:
    """Return the shortest time in which all threads do their work, in s."""
    taken = []
    for _ in range(REPEATS + 1):  # the first one starts threads and touches memory
        start = time.perf_counter()
        list(pool.map(work, range(threads)))
        taken.append(time.perf_counter() - start)
    return min(taken)
