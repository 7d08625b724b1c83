"""Assignment of GPUs to ranks."""

from __future__ import annotations

from typing import Any

from pydtnn.comm.communicator import Communicator


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
