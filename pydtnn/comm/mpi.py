"""The communicator over MPI: buffers handed to mpi4py, never pickles (except `gather_object`).

Arrays that are only moved travel as bytes, so any element type can be sent; those that are reduced
travel as the MPI type of their elements.
"""

from __future__ import annotations

import os
import sys
import warnings
from itertools import accumulate
from typing import Any

import numpy as np

from pydtnn.comm.arrays import overlap
from pydtnn.comm.communicator import Communicator, Request
from pydtnn.comm.failure import end_all_ranks_on_error
from pydtnn.comm.mailbox import wrong_length
from pydtnn.launcher import launched_ranks


def create_mpi() -> MpiCommunicator:
    """Make the communicator of all ranks of the MPI job. Collective: all ranks call it.

    Initialises MPI, and installs what ends all ranks when one of them fails
    (`end_all_ranks_on_error`).

    MPI is asked for THREAD_MULTIPLE, mpi4py's default: the thread that watches for signals may
    abort while the main thread is inside an MPI call. It costs nothing that matters: in MPICH 5.0
    an allreduce of 4 KB takes 5 instead of 3 us, and one of 2.6 MB 0.46 instead of 1.5 ms.

    Returns
    -------
    MpiCommunicator
        A duplicate of COMM_WORLD, so that our messages never meet those of the user's own code.

    Raises
    ------
    ImportError
        Where mpi4py or the MPI library cannot be loaded.
    ValueError
        Where the launcher belongs to another MPI than the library.
    """
    mpi = _initialise()
    world = mpi.COMM_WORLD.Dup()
    started = launched_ranks()
    if world.size == 1 and started is not None and started > 1:
        raise ValueError(_mismatch(mpi, f"started {started} processes, each of which is alone"))
    on_host = world.Split_type(mpi.COMM_TYPE_SHARED, key=world.rank)
    leader = on_host.bcast(world.rank)
    on_host.Free()
    comm = MpiCommunicator(mpi, world, world.allgather(leader))
    end_all_ranks_on_error(comm)
    return comm


def _initialise() -> Any:
    """Import and initialise `mpi4py.MPI`, unless the launcher is one that it cannot work with."""
    try:
        import mpi4py

        # Not by the import, as is mpi4py's default: MPICH ends the process with a page of text
        # where Open MPI's launcher started it, so the two are compared first.
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, libmpi is not
        reason = " ".join(str(error).split())
        raise ImportError(
            f"mpi: mpi4py cannot be imported ({reason}); install MPI with "
            "`pip install 'pydtnn[mpi]'`, or start one process without mpirun."
        ) from error
    if not MPI.Is_initialized():
        if "OMPI_COMM_WORLD_SIZE" in os.environ and "Open MPI" not in _library(MPI):
            raise ValueError(_mismatch(MPI, "is that of Open MPI"))
        with warnings.catch_warnings():
            # mpi4py's own warning of the same, several lines on each rank; we raise instead.
            warnings.filterwarnings("ignore", "suspicious MPI execution", RuntimeWarning)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def _mismatch(mpi: Any, what: str) -> str:
    return (
        f"mpi: the launcher {what}, but mpi4py uses {_library(mpi)}; start with the mpiexec that "
        f"belongs to it (look in {os.path.dirname(sys.executable)})."
    )


def _library(mpi: Any) -> str:
    """Name and version of the MPI library: "Open MPI v5.0.11", "MPICH 5.0.2"."""
    name = mpi.Get_library_version().splitlines()[0].split(",")[0]
    return " ".join(name.replace("Version:", "").split())


class MpiCommunicator(Communicator):
    """A group of MPI processes.

    Parameters
    ----------
    mpi : module
        `mpi4py.MPI`; the module is handed on because nothing else may import it.
    comm : mpi4py.MPI.Intracomm
        The group; ours alone.
    hosts : list of int
        Names the host of each rank.
    """

    def __init__(self, mpi: Any, comm: Any, hosts: list[int]) -> None:
        super().__init__(comm.rank, hosts)
        self._mpi = mpi
        self._comm = comm
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}

    def barrier(self) -> None:
        self._comm.Barrier()

    def gather_object(self, value: Any) -> list[Any]:
        return self._comm.allgather(value)

    def abort(self, code: int) -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            # The reason has been printed by whoever aborts; MPICH would add a line without one.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        finally:
            self._mpi.COMM_WORLD.Abort(code)

    def _allreduce(self, array: np.ndarray, op: str) -> None:
        try:
            self._comm.Allreduce(self._mpi.IN_PLACE, array, self._ops[op])
        except (self._mpi.Exception, BufferError, KeyError, ValueError) as error:
            raise self._reduction_error(error, array) from error

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        try:
            request = self._comm.Iallreduce(self._mpi.IN_PLACE, array, self._ops[op])
        except (self._mpi.Exception, BufferError, KeyError, ValueError) as error:
            raise self._reduction_error(error, array) from error
        return _MpiRequest(request)

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        self._comm.Bcast(self._bytes(array), root)

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        try:
            self._comm.Reduce_scatter(array, out, counts, self._ops["sum"])
        except (self._mpi.Exception, BufferError, KeyError, ValueError) as error:
            raise self._reduction_error(error, array) from error

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        in_place = overlap(array, out)
        lengths = [count * out.itemsize for count in counts]
        begins = [0, *accumulate(lengths[:-1])]
        self._comm.Allgatherv(
            self._mpi.IN_PLACE if in_place else self._bytes(array),
            [out.view(np.uint8), lengths, begins, self._mpi.BYTE],
        )

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        return _MpiRequest(self._comm.Isend(self._bytes(array), to, tag))

    def _irecv(self, array: np.ndarray, source: int, tag: int) -> Request:
        request = self._comm.Irecv(self._bytes(array), source, tag)
        return _MpiReceive(self._mpi, request, array.nbytes)

    def _split(self, color: int, key: int) -> MpiCommunicator:
        child = self._comm.Split(color, key)
        return MpiCommunicator(self._mpi, child, child.allgather(self.hosts[self.rank]))

    def _bytes(self, array: np.ndarray) -> list[Any]:
        return [array.view(np.uint8), self._mpi.BYTE]

    def _reduction_error(self, error: Exception, array: np.ndarray) -> Exception:
        """Say that the library has no such type; anything else is passed on as it is."""
        mpi = self._mpi
        if isinstance(error, mpi.Exception) and error.Get_error_class() not in (
            mpi.ERR_OP,
            mpi.ERR_TYPE,
        ):
            return error
        return TypeError(
            f"mpi: {_library(mpi)} cannot reduce elements of type {array.dtype}; "
            "convert the array to float32 first."
        )


class _MpiRequest(Request):
    """An operation of MPI under way; mpi4py's request keeps its array alive."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()

    def test(self) -> bool:
        return self._request.Test()


class _MpiReceive(Request):
    """A receive under way, which checks the length of the message when it is complete."""

    def __init__(self, mpi: Any, request: Any, expected: int) -> None:
        self._mpi = mpi
        self._request = request
        self._status = mpi.Status()
        self._expected = expected
        self._done = False

    def wait(self) -> None:
        if not self._done:
            self._complete(self._request.Wait)

    def test(self) -> bool:
        if not self._done:
            self._complete(self._request.Test)
        return self._done

    def _complete(self, operation: Any) -> None:
        try:
            self._done = operation(self._status)
        except self._mpi.Exception as error:
            if error.Get_error_class() != self._mpi.ERR_TRUNCATE:
                raise
            raise ValueError(wrong_length(self._expected, None)) from error
        given = self._status.Get_count(self._mpi.BYTE)
        if self._done and given != self._expected:
            raise ValueError(wrong_length(self._expected, given))
