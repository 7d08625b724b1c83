"""How many threads each rank may use."""

from __future__ import annotations

import os
from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING

from pydtnn.utils.launcher import ranks_here
from pydtnn.utils.machine import cpu_quotas
from pydtnn.utils.validate import whole

if TYPE_CHECKING:
    from threadpoolctl import threadpool_limits

    from pydtnn.comm.communicator import Communicator

MOST_THREADS = 1024
"""Of a rank: more than a host has cores, and fewer than end a process."""


def default_threads() -> int:
    """Return OMP_NUM_THREADS where it is set, else this process's share of the cores.

    Without asking other ranks: the cores it may run on, divided by the ranks that the MPI launcher
    says it started on this host, unless it has pinned this one to some of them, and no more than
    its share of the CPU time that a control group may use. `threads_per_rank` is exact, also for
    unequal shares.

    Raises
    ------
    ValueError
        Where OMP_NUM_THREADS, or what the launcher has set, is not a positive number.
    """
    cores = _cores()
    pinned = len(cores) < (os.cpu_count() or 1)
    ranks = ranks_here()
    share = Fraction(len(cores), 1 if pinned else ranks)
    share = min([share, *(quota / ranks for quota in cpu_quotas().values())])
    return _wanted() or max(1, int(share))


def threads_per_rank(comm: Communicator) -> int:
    """Return the number of threads of this rank. Collective: all ranks call it.

    OMP_NUM_THREADS where it is set. Otherwise this rank's share of the cores it may run on, where a
    core is shared evenly by all ranks of its host that may run on it: cores // ranks where all may
    run everywhere, the rank's own cores where mpirun pinned it to some; at least 1. Where a control
    group limits the time that its processes use, they share that time evenly: a container with a
    limit of 4 cores on a host of 64 has 4.

    Parameters
    ----------
    comm : Communicator
        All ranks of the run.

    Returns
    -------
    int
        Number of threads, at least 1.

    Raises
    ------
    ValueError
        Where OMP_NUM_THREADS is not a positive number.
    """
    mine = _cores()
    here = comm.hosts[comm.rank]
    quotas = cpu_quotas()
    everywhere = comm.gather_object((here, mine, [*quotas]))
    beside = [(cores, groups) for host, cores, groups in everywhere if host == here]
    ranks_on = Counter(core for cores, _ in beside for core in cores)
    ranks_in = Counter(group for _, groups in beside for group in groups)
    own_cores = sum((Fraction(1, ranks_on[core]) for core in mine), Fraction(0))
    share = min([own_cores, *(quota / ranks_in[group] for group, quota in quotas.items())])
    return _wanted() or max(1, int(share))


def limit_blas_threads(threads: int) -> threadpool_limits:
    """Set the number of threads of every BLAS library that is loaded, for the whole process.

    For programs (the trainer, the command line), never at import: it changes what other code of the
    process sees.

    Parameters
    ----------
    threads : int
        Number of threads, at least 1.

    Returns
    -------
    threadpool_limits
        Restores the former numbers at the end of a `with` block, or by `restore_original_limits()`.
    """
    from threadpoolctl import threadpool_limits

    return threadpool_limits(limits=threads, user_api="blas")


def _cores() -> list[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS has no affinity


def _wanted() -> int | None:
    """OMP_NUM_THREADS: the first of a list such as "4,2", which is for the outermost level."""
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return None
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        raise ValueError(
            f"OMP_NUM_THREADS: expected a positive number, got {text!r}; unset it or use 1."
        )
    return whole("OMP_NUM_THREADS", "the number", int(first), at_least=1, at_most=MOST_THREADS)
