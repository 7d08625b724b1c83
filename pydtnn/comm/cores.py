"""Distribution of the cores of a host over its ranks."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

from pydtnn.comm.communicator import Communicator
from pydtnn.utils.machine import available_cores, cpu_quotas, requested_threads


def shared_gpu(comm: Communicator, xp: Any) -> str:
    """Return which ranks share a GPU. Collective: all ranks call it.

    Parameters
    ----------
    comm : Communicator
    xp : module
        CuPy or a compatible module; the GPU of the rank is its current device.

    Returns
    -------
    str
        "ranks 0, 2 share GPU 0000:01:00.0" for the first shared GPU, equal on all ranks; empty if
        every rank has a GPU of its own.
    """
    places = comm.gather_object((comm.hosts[comm.rank], str(xp.cuda.Device().pci_bus_id)))
    for place in places:
        ranks = [rank for rank, other in enumerate(places) if other == place]
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} share GPU {place[1]}"
    return ""


def threads_per_rank(comm: Communicator) -> int:
    """Return the number of threads of this rank. Collective: all ranks call it.

    This is OMP_NUM_THREADS if it is set. Otherwise it is this rank's share of the cores it may run
    on, where each core is divided evenly among the ranks of the host that may run on it: cores //
    ranks if all ranks may run on all cores, the rank's own cores if mpirun pinned it to some; at
    least 1. A limit of a control group on the processor time is divided evenly among its ranks: a
    container with a limit of 4 cores on a host with 64 has 4 cores.

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
        If OMP_NUM_THREADS is not a positive number.
    """
    mine = available_cores()
    here = comm.hosts[comm.rank]
    quotas = cpu_quotas()
    everywhere = comm.gather_object((here, mine, [*quotas]))
    beside = [(cores, groups) for host, cores, groups in everywhere if host == here]
    ranks_on = Counter(core for cores, _ in beside for core in cores)
    ranks_in = Counter(group for _, groups in beside for group in groups)
    own_cores = sum((Fraction(1, ranks_on[core]) for core in mine), Fraction(0))
    share = min([own_cores, *(quota / ranks_in[group] for group, quota in quotas.items())])
    return requested_threads() or max(1, int(share))
