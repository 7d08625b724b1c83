"""Kernels in a trace: their calls, and the limits of the machine that they can reach."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pydtnn.kernels.backend import Backend
from pydtnn.kernels.observed import wrapped_kernels
from pydtnn.utils.observer import Activity, Kind, Observer

SIDE = 768
"""Side of the matrices that are multiplied: they fit into the caches, and fill all registers."""

COPIED = 1 << 25
"""Bytes of the array that is copied: more than the caches of a core."""

MEASUREMENTS = 5
"""Measurements, of which the fastest counts; one more before them is not counted."""


def measure_limits(backend: Backend) -> dict[str, float]:
    """Measure a matrix product and a copy in float32, with the threads of a backend.

    It takes about 0.2 s. Other work on the machine reduces the results.

    Returns
    -------
    dict
        "flops_per_second" of the product in flop/s, and "bytes_per_second" of the copy, read and
        written bytes, in B/s; empty for a backend without compiled kernels on the host.
    """
    if backend.name != "cpu":
        return {}
    a, b, c = (np.ones((SIDE, SIDE), "float32") for _ in range(3))
    x = np.ones(COPIED // 4, "float32")
    y = np.empty_like(x)
    product = _shortest(lambda: backend.linear.forward(a, b, None, out=c))
    copy = _shortest(lambda: backend.elementwise.forward("relu", x, out=y))
    return {
        "flops_per_second": 2 * SIDE**3 / product,
        "bytes_per_second": 2 * COPIED / copy,
    }


def _shortest(call: Callable[[], object]) -> float:
    """Return the shortest time of a call, in s."""
    times = []
    for _ in range(MEASUREMENTS + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])


@contextmanager
def observed_kernels(backend: Backend, observer: Observer) -> Iterator[None]:
    """Context in which every kernel of a backend is an activity, such as "conv.forward".

    On a GPU the activity is the launch of the kernel. A call costs about 1 us more.

    Parameters
    ----------
    backend : Backend
    observer : Observer
        That of the thread in which the kernels are called.
    """

    def reported(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def report(*args: Any, **options: Any) -> Any:
            with Activity(observer, Kind.KERNEL, name):
                return call(*args, **options)

        return report

    with wrapped_kernels(backend, reported):
        yield
