"""The communicator over MPI, with mpi4py's buffer interface (except `gather_object`).

Arrays that are not reduced are sent as bytes, so any element type is supported; those that are
reduced are sent as the MPI type of their elements.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from pydtnn.comm.checks import overlap, wrong_length
from pydtnn.comm.communicator import Communicator
from pydtnn.comm.monitor.attendance import Attendance, Wait
from pydtnn.comm.monitor.failure import (
    FailureHooks,
    Started,
    end_all_ranks_on_error,
    start_early,
    watched,
    watched_failure,
)
from pydtnn.comm.monitor.links import FORWARDING_S
from pydtnn.comm.monitor.supervision import DEFAULT_TIMEOUT_S, Supervision
from pydtnn.comm.traffic import Traffic
from pydtnn.comm.ulfm import all_succeeded, complete_all, create_together, is_failure, watched_start
from pydtnn.comm.waiting import call_asleep, sleep_until, sleeps
from pydtnn.utils import clock
from pydtnn.utils.collective import call_difference
from pydtnn.utils.errors import AgreedError, RankFailure, describe, write_error
from pydtnn.utils.launcher import launched_ranks, local_ranks, survives
from pydtnn.utils.observer import Kind
from pydtnn.utils.request import Request

SHARED_MEMORY = "/dev/shm"
"""Folder in memory in which MPICH has the messages between the ranks of a host."""

RANK_B = 1600 << 10
"""Memory of a rank there, in B: 1.06 MB for messages, and a slot."""

MIN_FILES = 64
"""Open files of a process, without those for each rank of its host."""

MIN_FILE_B = 5 << 20
"""Length of a file in memory that UCX makes, in B."""


def create_mpi(timeout: float | None = None) -> MpiCommunicator:
    """Create the communicator of all ranks of the MPI job. Collective: all ranks call it.

    Initialises MPI, and installs `end_all_ranks_on_error`, which terminates all ranks if one fails.

    The thread level is THREAD_MULTIPLE, mpi4py's default: the thread that handles signals may
    abort while the main thread is inside an MPI call. The cost is negligible: in MPICH 5.0 an
    allreduce of 4 KB takes 5 instead of 3 us, and one of 2.6 MB 0.46 instead of 1.5 ms.

    Parameters
    ----------
    timeout : float, optional
        Longest wait for other ranks, in s; 0 for no limit. By default that of an earlier call, or
        `DEFAULT_TIMEOUT_S`.

    Returns
    -------
    MpiCommunicator
        A duplicate of COMM_WORLD, so that messages are separate from those of user code.

    Raises
    ------
    ImportError
        If mpi4py or the MPI library cannot be loaded.
    ValueError
        If the launcher belongs to another MPI than the library.
    """
    root = watched()  # of an earlier call
    if not isinstance(root, MpiCommunicator):
        timeout = DEFAULT_TIMEOUT_S if timeout is None else timeout
        with watched_start(timeout) as begun:
            with start_early() as started:
                mpi, ranks = _initialise(), launched_ranks()
                if mpi.COMM_WORLD.size == 1 and ranks is not None and ranks > 1:
                    raise ValueError(
                        _mismatch(mpi, f"started {ranks} processes, each of which is alone")
                    )
            begun()
            try:
                root = _create_root(mpi, started)
            except Exception as error:
                if not survives():  # the others wait for this rank
                    write_error(f"rank {mpi.COMM_WORLD.rank}: {describe(error)}\n")
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPICH would add a line
                    time.sleep(FORWARDING_S)
                    mpi.COMM_WORLD.Abort(1)
                raise
    supervision = root.supervision
    if supervision is not None and timeout is not None:
        supervision.limit(timeout)
    try:
        comm = root._split(0, 0)
    except RankFailure:  # on all remaining ranks
        if not survives():
            raise
        comm = root.shrink()
    comm.traffic = Traffic(usual=None if supervision is None else supervision.activity)
    comm.observe(None)
    return comm


def _create_root(mpi: Any, started: Started | None) -> MpiCommunicator:
    """Create the communicator of all ranks from which those of users are split off."""

    def create(world: Any) -> MpiCommunicator:
        on_host = world.Split_type(mpi.COMM_TYPE_SHARED, key=world.rank)
        leader = on_host.bcast(world.rank)
        on_host.Free()
        root = MpiCommunicator(mpi, world, world.allgather(leader))
        failure = end_all_ranks_on_error(root, started)
        root._watch_attendance(failure)
        return root

    return create_together(mpi, mpi.COMM_WORLD, mpi.COMM_WORLD.Dup, create)


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
            "`pip install mpich`, or start one process without mpirun."
        ) from error
    if not MPI.Is_initialized():
        if "OMPI_COMM_WORLD_SIZE" in os.environ and "Open MPI" not in _library(MPI):
            raise ValueError(_mismatch(MPI, "is that of Open MPI"))
        if sys.platform == "linux" and "MPICH" in _library(MPI):
            _check_host(_library(MPI), local_ranks())
        with warnings.catch_warnings():
            # mpi4py's own warning of the same, several lines on each rank; we raise instead.
            warnings.filterwarnings("ignore", "suspicious MPI execution", RuntimeWarning)
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def _check_host(library: str, ranks: int) -> None:
    """Raise ValueError where MPICH would end the process with a page of text, or never return."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        raise ValueError(
            f"mpi: {library} requires a folder {SHARED_MEMORY} that can be written, for messages; "
            "mount it read-write, or start one process without mpirun."
        )
    memory, needed = os.statvfs(SHARED_MEMORY), ranks * RANK_B
    size = memory.f_blocks * memory.f_frsize or resource.RLIM_INFINITY
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    length, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    for given, least, what in (
        (size, needed, f"B in {SHARED_MEMORY} (docker --shm-size)"),
        (files, MIN_FILES + ranks, "open files (ulimit -n)"),
        (length, max(MIN_FILE_B, needed), "B of a file (ulimit -f)"),
    ):
        if ranks > 1 and 0 <= given < least:
            raise ValueError(
                f"mpi: {library} requires {least:,} {what} for {ranks} ranks, got {given:,}; "
                "raise the limit"
            )


def _mismatch(mpi: Any, what: str) -> str:
    return (
        f"mpi: the launcher {what}, but mpi4py uses {_library(mpi)}; start with the mpiexec that "
        f"belongs to it (look in {os.path.dirname(sys.executable)})."
    )


def _library(mpi: Any) -> str:
    """Name and version of the MPI library: "Open MPI v5.0.11", "MPICH 5.0.2"."""
    name = mpi.Get_library_version().splitlines()[0].split(",")[0]
    return " ".join(name.replace("Version:", "").split())


@dataclass
class _MpiGroup:
    """An MPI communicator and the groups that were split off from it, by their number.

    Groups exist until they are freed, by `free` or when no rank has a communicator for them.
    """

    comm: Any
    name: str = "all"
    members: Sequence[int] = ()  # numbers of its ranks among all
    owner: Callable[[], MpiCommunicator | None] = field(default=lambda: None)
    splits: dict[int, _MpiGroup] = field(default_factory=dict)
    made: int = 0
    collect_at: int = 64

    def free(self) -> None:
        """Free the group and those split off from it."""
        for group in self.splits.values():
            group.free()
        self.splits.clear()
        if self.comm:  # false once it is freed
            self.comm.Free()

    def revoke(self) -> None:
        """Have all pending and later calls of all ranks of these groups fail."""
        for group in self.splits.values():
            group.revoke()
        if self.comm:
            self.comm.Revoke()

    def free_dropped(self) -> None:
        """Free split groups without references on any rank. Collective: all ranks call it."""
        if not self.splits:
            return
        if len(self.splits) >= self.collect_at:  # alike on all ranks; objects may be in cycles
            gc.collect()
        dropped = [number for number, group in self.splits.items() if group.owner() is None]
        everywhere = map(set, self.comm.allgather(dropped))
        for split in sorted(set.intersection(*everywhere)):
            self.splits.pop(split).free()
        if len(self.splits) >= self.collect_at:
            self.collect_at *= 2


class MpiCommunicator(Communicator):
    """A group of MPI processes.

    Parameters
    ----------
    mpi : module
        `mpi4py.MPI`; an argument, as nothing else may import it.
    comm : mpi4py.MPI.Intracomm
        The group; not used by other code.
    hosts : list of int
        Host of each rank.
    parent : MpiCommunicator, optional
        Communicator from which the group was split off.

    Attributes
    ----------
    attendance : Attendance
        Collective calls of this rank and pending waits; shared by all groups.
    """

    def __init__(
        self, mpi: Any, comm: Any, hosts: list[int], parent: MpiCommunicator | None = None
    ) -> None:
        super().__init__(comm.rank, hosts, None if parent is None else parent.traffic)
        self._mpi = mpi
        self._comm = comm
        self.launched = mpi.COMM_WORLD.size
        self._ops = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}
        self._sleeps: bool = sleeps() if parent is None else parent._sleeps
        self._parent = parent  # kept alive: it knows the groups that were split off
        self.attendance: Attendance = Attendance() if parent is None else parent.attendance
        self._group = _MpiGroup(comm, members=self.members)
        # Requests that are not complete, with their arrays, if ranks may fail meanwhile.
        own: set[Request] | None = set() if survives() else None
        self.pending: set[Request] | None = own if parent is None else parent.pending

    @property
    def supervision(self) -> Supervision | None:
        return self.attendance.supervision

    def _barrier(self) -> None:
        self._call("barrier", self._comm.Barrier)

    def _gather_object(self, value: Any) -> list[Any]:
        own = f"gather_object{self.traffic.within}", value
        gathered = self._call("gather_object", self._comm.allgather, own)
        calls, values = zip(*gathered, strict=True)
        if len({*calls}) > 1:
            raise AgreedError(call_difference(calls))
        return [*values]

    def _counted(self, what: str) -> Wait:
        """Count a collective call that this rank may wait for."""
        name, calls = self._group.name, self.attendance.calls
        calls[name] += 1
        return Wait(name, what, calls[name])

    def _call(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a blocking collective call."""
        self.attendance.enter(self._counted(what))
        try:
            return call_asleep(self._comm, call, args) if self._sleeps else call(*args)
        except self._mpi.Exception as error:
            self.raise_failure(error)
            raise
        finally:
            self.attendance.exit()

    def raise_failure(self, error: Exception) -> None:
        """Raise `RankFailure` if a call has failed because ranks have failed."""
        revoked = survives() and bool(self._comm) and self._comm.Is_revoked()
        if revoked or is_failure(self._mpi, error):
            raise RankFailure from error

    def _free(self) -> None:
        self._start(self._comm.Free)

    def abort(self, code: int) -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            # The caller has printed the reason; MPICH would add a line without one.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        finally:
            if survives():  # Abort would end this rank alone, and the others not learn of it
                os._exit(code)
            self._mpi.COMM_WORLD.Abort(code)

    def _allreduce(self, array: np.ndarray, op: str) -> None:
        try:
            reduction = self._ops[op]
            self._call("allreduce", self._comm.Allreduce, self._mpi.IN_PLACE, array, reduction)
        except (self._mpi.Exception, BufferError, KeyError, ValueError) as error:
            raise self._reduction_error(error, array) from error

    def _iallreduce(self, array: np.ndarray, op: str) -> Request:
        try:
            request = self._comm.Iallreduce(self._mpi.IN_PLACE, array, self._ops[op])
        except (self._mpi.Exception, BufferError, KeyError, ValueError) as error:
            raise self._reduction_error(error, array) from error
        return _MpiRequest(self, request, self._counted("iallreduce"), array)

    def _broadcast(self, array: np.ndarray, root: int) -> None:
        self._call("broadcast", self._comm.Bcast, self._bytes(array), root)

    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        try:
            call, reduction = self._comm.Reduce_scatter, self._ops["sum"]
            self._call("reduce_scatter", call, array, out, counts, reduction)
        except (self._mpi.Exception, BufferError, KeyError, ValueError) as error:
            raise self._reduction_error(error, array) from error

    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None:
        in_place = overlap(array, out)
        lengths = [count * out.itemsize for count in counts]
        begins = [0, *accumulate(lengths[:-1])]
        self._call(
            "allgather",
            self._comm.Allgatherv,
            self._mpi.IN_PLACE if in_place else self._bytes(array),
            [out.view(np.uint8), lengths, begins, self._mpi.BYTE],
        )

    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request:
        start = clock.now_ns()
        request = self._start(self._comm.Isend, self._bytes(array), to, tag)
        sent = _MpiRequest(self, request, self._message("send", to), array)
        return self._report_message(sent, Kind.SENT, start, to, tag, array.nbytes)

    def _irecv(self, array: np.ndarray, source: int | None, tag: int) -> Request:
        start = clock.now_ns()
        sender = self._mpi.ANY_SOURCE if source is None else source
        request = self._start(self._comm.Irecv, self._bytes(array), sender, tag)
        received = _MpiReceive(self, request, self._message("recv", source), array)
        return self._report_message(received, Kind.RECEIVED, start, source, tag, array.nbytes)

    def _start(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except self._mpi.Exception as error:
            self.raise_failure(error)
            raise

    def _message(self, what: str, peer: int | None) -> Wait:
        return Wait(self._group.name, what, 0, -1 if peer is None else self._group.members[peer])

    def _split(self, color: int, key: int) -> MpiCommunicator:
        child: MpiCommunicator = self._call("split", self._new_group, color, key)
        return child

    def _new_group(self, color: int, key: int) -> MpiCommunicator:
        mine = self._group
        mine.free_dropped()
        comm, gathered = self._new_comm(color, key)
        hosts, members = zip(*gathered, strict=True)
        child = MpiCommunicator(self._mpi, comm, list(hosts), self)
        name = f"{mine.name}/{mine.made}.{color}"
        child.members, child.name = members, name
        self.attendance.calls[name] = 0
        child._group = _MpiGroup(comm, name, members, weakref.ref(child))
        mine.splits[mine.made] = child._group
        mine.made += 1
        return child

    def _new_comm(self, color: int, key: int) -> tuple[Any, list[tuple[int, int]]]:
        """Split the MPI communicator; return host and number of each rank of the group, too."""
        own = self.hosts[self.rank], self._group.members[self.rank]
        comm, gathered, problem = None, [], None
        try:
            comm = self._comm.Split(color, key)
            gathered = comm.allgather(own)
        except Exception as error:  # of any kind: a failed call may return garbage
            if not (is_failure(self._mpi, error) or self.lost_ranks()):
                raise
            problem = error
        # Where it has succeeded while it failed on another rank, the group must not be used.
        if survives() and not all_succeeded(self._mpi, self._comm, problem is None):
            raise RankFailure from problem
        return comm, gathered

    # -- failures ---------------------------------------------------------------------------------

    def why_not_survived(self) -> str:
        if survives():
            return ""
        if "Open MPI" not in _library(self._mpi):
            return f"{_library(self._mpi)} ends all ranks if one is killed"
        return f"{_library(self._mpi)} was started without --with-ft ulfm"

    def lost_ranks(self) -> bool:
        if not survives():
            return False
        until = time.monotonic() + NOTICED_S
        while True:
            failed = self._comm.Get_failed()
            lost = failed.size > 0 or self._comm.Is_revoked()
            failed.Free()
            if lost or time.monotonic() > until:
                return lost
            with contextlib.suppress(self._mpi.Exception):
                self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)  # makes progress
            time.sleep(1e-3)

    def all_remain(self) -> bool:
        if not survives():
            return super().all_remain()
        self.attendance.enter(self._counted("all_remain"))
        try:
            known = self._comm.Get_failed()
            complete = known.size == 0
            known.Free()
            return all_succeeded(self._mpi, self._comm, complete)
        finally:
            self.attendance.exit()

    def shrink(self) -> MpiCommunicator:
        root = self._parent or self
        if root._parent is not None:
            return self._shrink_alone()
        before = root.attendance
        before.close()
        root._group.revoke()
        complete_all(root.pending or ())
        failure = watched_failure()
        assert failure is not None

        def create(world: Any) -> MpiCommunicator:
            own = root.hosts[root.rank], root._group.members[root.rank]
            hosts, members = zip(*world.allgather(own), strict=True)
            remaining = MpiCommunicator(self._mpi, world, list(hosts))
            remaining.members = remaining._group.members = members
            name = f"{remaining.size} of {remaining.launched}"  # its calls are counted anew
            remaining.name = remaining._group.name = name
            remaining._watch_attendance(failure)
            comm = remaining._split(0, 0)
            comm.traffic = self.traffic
            before.enter(recovery)  # again: the others may need another attempt
            return comm

        recovery = Wait(root.name, "recovery")
        before.enter(recovery)
        try:
            comm = create_together(self._mpi, root._comm, root._comm.Shrink, create)
        finally:
            before.exit()
        failure.comm = comm._parent or comm
        return comm

    def _shrink_alone(self) -> MpiCommunicator:
        """Return the remaining ranks of a group that was split off; others learn nothing of it."""
        self._group.revoke()
        complete_all(self.pending or ())

        def create(comm: Any) -> MpiCommunicator:
            own = self.hosts[self.rank], self.members[self.rank]
            hosts, members = zip(*comm.allgather(own), strict=True)
            group = MpiCommunicator(self._mpi, comm, list(hosts), self._parent)
            name = f"{self.name}/{group.size} of {self.size}"  # its calls are counted anew
            group.members, group.name = members, name
            group._group = _MpiGroup(comm, name, members)
            return group

        return create_together(self._mpi, self._comm, self._comm.Shrink, create)

    def _watch_attendance(self, failure: FailureHooks) -> None:
        """Detect ranks that wait for one whose program has ended. Collective."""
        self.attendance.supervision = failure.supervision
        if self.size > 1:
            self.attendance.watch(self._mpi, self._comm.Dup(), failure.supervision)

    def _bytes(self, array: np.ndarray) -> list[Any]:
        return [array.view(np.uint8), self._mpi.BYTE]

    def _reduction_error(self, error: Exception, array: np.ndarray) -> Exception:
        """Return an error for a type that the library cannot reduce; other errors are unchanged."""
        mpi = self._mpi
        self.raise_failure(error)
        if isinstance(error, mpi.Exception) and error.Get_error_class() not in (
            mpi.ERR_OP,
            mpi.ERR_TYPE,
        ):
            return error
        return TypeError(
            f"mpi: {_library(mpi)} cannot reduce elements of type {array.dtype}; "
            "convert the array to float32 first."
        )


NOTICED_S = 0.3
"""Seconds in which a rank learns that another one has failed."""


class _MpiRequest(Request):
    """A pending MPI operation.

    It keeps its array alive: the requests of mpi4py 4.1 do not, for reductions.
    """

    def __init__(self, comm: MpiCommunicator, request: Any, wait: Wait, array: np.ndarray) -> None:
        self._comm = comm  # kept alive: its group must not be freed
        self._request = request
        self._array: np.ndarray | None = array
        self._wait = wait
        if comm.pending is not None:
            comm.pending.add(self)

    def wait(self) -> None:
        attendance = self._comm.attendance
        attendance.enter(self._wait)
        try:
            if self._comm._sleeps:
                sleep_until(self.test)
            else:
                self._complete(self._request.Wait)
        finally:
            attendance.exit()

    def test(self) -> bool:
        return self._complete(self._request.Test)

    def _complete(self, operation: Callable[..., bool], *args: Any) -> bool:
        comm = self._comm
        try:
            done = bool(operation(*args))
        except comm._mpi.Exception as error:
            if comm.pending is not None:
                comm.pending.discard(self)
            comm.raise_failure(error)
            raise
        if done:
            self._array = None
            if comm.pending is not None:
                comm.pending.discard(self)
        return done


class _MpiReceive(_MpiRequest):
    """A pending receive, which checks the length of the message when it is complete."""

    def __init__(self, comm: MpiCommunicator, request: Any, wait: Wait, array: np.ndarray) -> None:
        super().__init__(comm, request, wait, array)
        self._mpi = comm._mpi
        self._status = self._mpi.Status()
        self._expected = array.nbytes
        self._done = False

    @property
    def source(self) -> int:
        return int(self._status.source) if self._done else -1

    def _complete(self, operation: Callable[..., bool], *args: Any) -> bool:
        if self._done:
            return True
        try:
            self._done = super()._complete(operation, self._status)
        except self._mpi.Exception as error:
            if error.Get_error_class() != self._mpi.ERR_TRUNCATE:
                raise
            raise ValueError(wrong_length(self._expected, None)) from error
        given = self._status.Get_count(self._mpi.BYTE)
        if self._done and given != self._expected:
            raise ValueError(wrong_length(self._expected, given))
        return self._done
