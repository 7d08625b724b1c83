"""Loads OpenMP's runtime, with a bound on how long its threads wait for work without sleeping.

Between two kernels, and at the end of one, a thread of GCC's runtime asks again and again whether
there is work, by default 300,000 times, which takes milliseconds. That is right where each thread
has a core: waking one that sleeps takes tens of microseconds. Where another process has work for
the core, the waiting thread keeps it from the very thread that it waits for: with two threads on
two busy cores a ReLU of 40,000 elements took 39 ms instead of 0.002. `SPINS` covers what Python
does between two kernels, and is over before the system would give the core to another process.

The runtime reads its environment when it is loaded, and has no function for this. So this module
is imported before all that link it, sets a variable for just that moment, and leaves it alone where
the user has set one. Where another library has loaded the same runtime before, its settings hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SPINS = "10000"
"""How often a thread asks before it sleeps: 0.3 to 0.5 ms on current x86 CPUs.

With 3,000 the threads slept between the kernels of small networks: an MLP's step on two threads
took 1.06 times as long as with 10,000, one of ResNet-44 1.01 times.
"""

VARIABLE = "GOMP_SPINCOUNT"

WISHES = (VARIABLE, "OMP_WAIT_POLICY")
"""Variables in which users say how threads shall wait."""


@contextmanager
def bounded_spin() -> Iterator[None]:
    """Let a runtime that is loaded within the context spin for `SPINS`, unless the user decided."""
    if any(name in os.environ for name in WISHES):
        yield
        return
    os.environ[VARIABLE] = SPINS
    try:
        yield
    finally:
        del os.environ[VARIABLE]


with bounded_spin():
    import pydtnn.kernels.cpu._linear  # noqa: F401  # links the runtime, as others do
