"""Communicators: ranks, collectives and messages.

`create_communicator` returns the group of all ranks, `run_threads` runs a group of threads for
tests and notebooks; both are a `Communicator`. mpi4py is imported only if the group requires it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydtnn.comm.agree import agree, require_equal
from pydtnn.comm.communicator import Communicator, communicator_of_thread
from pydtnn.comm.serial import Serial
from pydtnn.utils.launcher import launched
from pydtnn.utils.names import module_getattr, unknown
from pydtnn.utils.request import Completed, Request

__all__ = [
    "Communicator",
    "Completed",
    "Request",
    "agree",
    "create_communicator",
    "require_equal",
    "run_threads",
]


def create_communicator(name: str = "auto", *, timeout: float | None = None) -> Communicator:
    """Create the communicator of all ranks of this run. Collective: all ranks call it.

    Parameters
    ----------
    name : {"auto", "serial", "mpi"}
        "auto" is the rank's communicator within `run_threads`; otherwise "mpi" if an MPI launcher
        (mpirun, srun) started this process, else "serial".
    timeout : float, optional
        Over MPI, the longest wait for other ranks or for a batch, in s; by default 300. Then a
        table of what each rank is doing is printed, and all ranks end with status 75. 0: no limit.

    Returns
    -------
    Communicator
        With "mpi", an uncaught error of one rank terminates all ranks from now on. With several
        hosts, allreduce schedules are chosen by `pydtnn.comm.schedules.rule`;
        ``create_allreduce("vendor", comm)`` uses the MPI library's own allreduce instead.

    Raises
    ------
    ImportError
        If MPI is requested, or a launcher is present, and mpi4py cannot be imported.
    ValueError
        If the name is unknown, or the launcher's processes do not form one group.
    """
    if timeout is not None and not timeout >= 0:
        raise ValueError(
            f"create_communicator: timeout must be at least 0 s, got {timeout}; 0 is no limit"
        )
    if name == "auto":
        own = communicator_of_thread()
        if own is not None:
            return own
        name = "mpi" if launched() else "serial"
    if name == "serial":
        return Serial()
    if name == "mpi":
        from pydtnn.comm.mpi import create_mpi
        from pydtnn.comm.schedules.rule import by_rule

        return by_rule(create_mpi(timeout))
    raise ValueError(unknown("communicator", name, ("auto", "serial", "mpi")))


if TYPE_CHECKING:
    from pydtnn.comm.thread import run_threads
else:  # type checkers would accept any name
    __getattr__ = module_getattr(__name__, {"run_threads": "pydtnn.comm.thread"})
