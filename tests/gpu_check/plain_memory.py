"""A plugin of pytest: every array of CuPy is an allocation of its own, as a sanitizer needs it.

In CuPy's pool arrays share large allocations, and one that is written past its end writes into its
neighbour, which no tool can see.
"""

from __future__ import annotations


def pytest_configure() -> None:
    """Let CuPy ask the driver for every array."""
    import cupy

    cupy.cuda.set_allocator(None)
