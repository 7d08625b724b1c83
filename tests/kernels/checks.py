"""What the tests of kernels share: numeric gradients, units of rounding, threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pydtnn.kernels import Backend, create_backend

DTYPES = ("float32", "float64")
REFERENCE = create_backend("numpy")


def numeric_gradient(
    f: Callable[[np.ndarray], np.ndarray], x: np.ndarray, dy: np.ndarray | float, step: float = 1e-6
) -> np.ndarray:
    """Differentiate ``sum(f(x) dy)`` by central differences, in float64."""
    gradient = np.empty_like(x)
    for i in np.ndindex(x.shape):
        sides = []
        for sign in (1, -1):
            moved = x.copy()
            moved[i] += sign * step
            sides.append(np.sum(f(moved) * dy))
        gradient[i] = (sides[0] - sides[1]) / (2 * step)
    return gradient


def eps(dtype: str) -> float:
    """Distance from 1 to the next number."""
    return float(np.finfo(dtype).eps)


def ulps(actual: np.ndarray, exact: np.ndarray) -> float:
    """Largest error in units of the last place of the exact value, which has more digits."""
    unit = np.spacing(np.abs(exact).astype(actual.dtype))
    return float(np.max(np.abs(actual - exact) / unit, initial=0))


def same_for_all_threads(
    backend: Backend, run: Callable[[Backend], Sequence[np.ndarray | float]]
) -> None:
    """Check that one, two, three and 16 threads give the same bytes."""
    results = [
        [np.asarray(array).tobytes() for array in run(with_threads(backend, threads))]
        for threads in (1, 2, 3, 16)
    ]
    assert all(result == results[0] for result in results[1:])


def with_threads(backend: Backend, threads: int) -> Backend:
    """The same backend with another number of threads."""
    return create_backend("cpu", threads=threads, isa=backend.isa)
