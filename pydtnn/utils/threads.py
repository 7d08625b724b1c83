"""Number of threads per rank."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import TYPE_CHECKING

from pydtnn.utils.launcher import ranks_here
from pydtnn.utils.machine import cpu_quotas
from pydtnn.utils.validate import whole

if TYPE_CHECKING:
    from threadpoolctl import threadpool_limits

MOST_THREADS = 1024
"""Maximum threads of a rank: above the cores of any host, below the limits of a process."""


def default_threads() -> int:
    """Return OMP_NUM_THREADS if it is set, otherwise this process's share of the cores.

    Computed without communication: the cores that this process may run on, divided by the number
    of ranks on this host according to the MPI launcher (unless this rank is pinned to a subset of
    the cores), and at most its share of the CPU time of its control groups. `pydtnn.comm.cores` is
    exact, also for unequal shares.

    Raises
    ------
    ValueError
        If OMP_NUM_THREADS or a variable of the launcher is not a positive number.
    """
    cores = cores_here()
    pinned = len(cores) < (os.cpu_count() or 1)
    ranks = ranks_here()
    share = Fraction(len(cores), 1 if pinned else ranks)
    share = min([share, *(quota / ranks for quota in cpu_quotas().values())])
    return requested_threads() or max(1, int(share))


def limit_blas_threads(threads: int) -> threadpool_limits:
    """Set the number of threads of every loaded BLAS library, for the whole process.

    For programs (the trainer, the command line), never at import: it affects other code in the
    process.

    Parameters
    ----------
    threads : int
        Number of threads, at least 1.

    Returns
    -------
    threadpool_limits
        Restores the previous numbers at the end of a `with` block or in
        `restore_original_limits()`.
    """
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=threads, user_api="blas")


def cores_here() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS has no affinity


def requested_threads() -> int | None:
    """Return OMP_NUM_THREADS; of a list such as "4,2", the first number (outermost level)."""
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return None
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        raise ValueError(
            f"OMP_NUM_THREADS: expected a positive number, got {text!r}; unset it or use 1."
        )
    return whole("OMP_NUM_THREADS", "the number", int(first), at_least=1, at_most=MOST_THREADS)
