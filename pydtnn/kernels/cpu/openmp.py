"""Load OpenMP's runtime with a limit on the time its threads spin before they sleep.

Between two kernels, and at the end of one, a thread of GCC's runtime polls for work, by default
300,000 times, which takes milliseconds. This is efficient if each thread has a core: waking a
sleeping thread takes tens of microseconds. If another process uses the core, the waiting thread
delays the thread that it waits for: with two threads on two busy cores a ReLU of 40,000 elements
took 39 ms instead of 0.002. `SPINS` covers the Python code between two kernels, and is shorter than
a time slice of the system.

The runtime reads its environment when it is loaded, and has no function for this. This module is
therefore imported before all modules that link the runtime, sets a variable during loading, and
does not change a value set by the user. If another library has loaded the same runtime before, its
settings apply.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SPINS = "10000"
"""Number of polls before a thread sleeps: 0.3 to 0.5 ms on current x86 CPUs.

With 3,000 the threads slept between the kernels of small networks: an MLP's step on two threads
took 1.06 times as long as with 10,000, one of ResNet-44 1.01 times.
"""

SPIN_VARIABLE = "GOMP_SPINCOUNT"

WAIT_VARIABLES = (SPIN_VARIABLE, "OMP_WAIT_POLICY")
"""Environment variables that control waiting."""


@contextmanager
def bounded_spin() -> Iterator[None]:
    """Set `SPINS` for a runtime loaded within the context, unless the user has set a value."""
    if any(name in os.environ for name in WAIT_VARIABLES):
        yield
        return
    os.environ[SPIN_VARIABLE] = SPINS
    try:
        yield
    finally:
        del os.environ[SPIN_VARIABLE]


with bounded_spin():
    import pydtnn.kernels.cpu._linear  # noqa: F401  # links the runtime
