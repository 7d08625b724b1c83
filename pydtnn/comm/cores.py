"""How the ranks of a host share its cores."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from pydtnn.comm.communicator import Communicator
from pydtnn.utils.machine import cpu_quotas
from pydtnn.utils.threads import cores_here, threads_wanted


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
    mine = cores_here()
    here = comm.hosts[comm.rank]
    quotas = cpu_quotas()
    everywhere = comm.gather_object((here, mine, [*quotas]))
    beside = [(cores, groups) for host, cores, groups in everywhere if host == here]
    ranks_on = Counter(core for cores, _ in beside for core in cores)
    ranks_in = Counter(group for _, groups in beside for group in groups)
    own_cores = sum((Fraction(1, ranks_on[core]) for core in mine), Fraction(0))
    share = min([own_cores, *(quota / ranks_in[group] for group, quota in quotas.items())])
    return threads_wanted() or max(1, int(share))
