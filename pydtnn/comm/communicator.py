"""Interface of communicators: flat arrays, collectives, messages, groups.

The public methods check their arguments and call the few methods that begin with an underscore;
implementations define only those, so all communicators raise the same errors. A group of one rank
is an ordinary group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

import numpy as np

from pydtnn.comm.checks import (
    address,
    check_array,
    check_other,
    check_parts,
    check_rank,
    check_reduction,
    check_tag,
    overlap,
)
from pydtnn.comm.monitor.supervision import Supervision
from pydtnn.comm.traffic import CountedCall, CountedRequest, ReportedMessage, Traffic
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.names import SuggestsNames
from pydtnn.utils.observer import Kind, Observer
from pydtnn.utils.request import Request, Together

Message = tuple[np.ndarray, int]
"""An array, and the rank that it is sent to or received from."""


CALLS = (
    *("allreduce", "iallreduce", "broadcast", "reduce_scatter", "allgather", "barrier"),
    *("gather_object", "send", "recv", "isend", "irecv", "exchange", "split", "split_by_host"),
)
"""Methods that raise ValueError once the communicator is freed."""


class Communicator(SuggestsNames, ABC):
    """A group of ranks that exchange flat, contiguous arrays.

    Arrays are one-dimensional. Reductions require integers or floats; other operations accept any
    type except Python objects. All ranks of a group make the same collective calls in the same
    order, with arrays of the same type and length (parts may differ in length).

    Arrays are NumPy arrays or, if the implementation supports it, device arrays. Operations on the
    latter are ordered by the device's current stream: they run after the work enqueued there so
    far, and work enqueued after `wait`, or after `test` has returned True, runs after them. The
    host need not block.

    Parameters
    ----------
    rank : int
        This rank in the group, from 0.
    hosts : sequence of hashable
        Identifier of the host of each rank of the group; equal for ranks that share memory.

    Attributes
    ----------
    rank, size : int
        This rank and the number of ranks.
    hosts : tuple of int
        The host of every rank, identified by the first rank on it: (0, 0, 2, 2).
    local_rank, local_size : int
        This rank among those on its host, and their number.
    members : sequence of int
        The ranks of this group, numbered among all ranks of the run.
    launched : int
        The number of ranks with which the run began, which includes those that have failed.
    name : str
        Name of this group, equal on all of its ranks, and different from that of other groups that
        a rank belongs to.
    capturable : bool
        Whether collectives on device arrays can be captured in a CUDA graph: they run only on the
        device, and the host does not wait for them.
    transport : str
        How arrays of a device are sent; empty for those in host memory.
    freed : bool
        Whether `free` has been called.
    traffic : Traffic
        Counts the calls of this communicator, of groups that are split off from it, and of
        communicators that wrap it.
    """

    capturable = False
    transport = ""
    freed = False
    name = "all"

    @property
    def summing(self) -> Communicator:
        """The communicator that adds arrays up."""
        return self

    def __init__(
        self, rank: int, hosts: Sequence[Hashable], traffic: Traffic | None = None
    ) -> None:
        first: dict[Hashable, int] = {}
        self.rank = rank
        self.size = len(hosts)
        self.hosts = tuple(first.setdefault(host, index) for index, host in enumerate(hosts))
        self.local_rank = self.hosts[:rank].count(self.hosts[rank])
        self.local_size = self.hosts.count(self.hosts[rank])
        self.members: Sequence[int] = range(self.size)
        self.launched = self.size
        self.traffic = traffic or Traffic()
        self._others = (self.size - 1) / self.size

    @property
    def supervision(self) -> Supervision | None:
        """What this rank shares with the monitor process of its host; None without one."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"

    # -- collectives ------------------------------------------------------------------------------

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """Reduce an array over all ranks, in place. Collective: all ranks call it.

        Parameters
        ----------
        array : ndarray (n,)
            The rank's contribution; the reduction afterwards, equal on all ranks.
        op : {"sum", "max", "min"}
            Element-wise reduction.
        """
        check_array("allreduce", array)
        check_reduction("allreduce", array, op)
        with self._metered("allreduce", 2 * self._others * array.nbytes):
            self._allreduce(array, op)

    def iallreduce(self, array: np.ndarray, op: str = "sum") -> Request:
        """Start `allreduce` and return immediately. Collective: all ranks call it.

        Several operations can be pending; all ranks start them in the same order. The array must be
        neither read nor written before the request is complete.
        """
        check_array("iallreduce", array)
        check_reduction("iallreduce", array, op)
        with self._metered("iallreduce", 2 * self._others * array.nbytes):
            request = self._iallreduce(array, op)
        return CountedRequest(request, self.traffic, "iallreduce", self.name)

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Copy the array of rank `root` to all ranks, in place. Collective: all ranks call it."""
        check_array("broadcast", array)
        root = check_rank("broadcast", root, self.size)
        with self._metered("broadcast", self._others * array.nbytes):
            self._broadcast(array, root)

    def reduce_scatter(self, array: np.ndarray, counts: Sequence[int], out: np.ndarray) -> None:
        """Sum arrays over the ranks and scatter the parts. Collective: all ranks call it.

        Parameters
        ----------
        array : ndarray (sum of counts,)
            The rank's contribution, unchanged.
        counts : sequence of int
            Length of the part of each rank, in the order of the ranks; may be 0.
        out : ndarray (counts[rank],)
            This rank's part of the sum; must not overlap `array`.
        """
        check_array("reduce_scatter", array, writes=False)
        check_array("reduce_scatter", out)
        check_reduction("reduce_scatter", array, "sum")
        counts = check_parts("reduce_scatter", out, counts, array, self.rank, self.size)
        if overlap(array, out):
            raise ValueError(
                "reduce_scatter: out must not overlap array; allocate separate memory for out."
            )
        with self._metered("reduce_scatter", self._others * array.nbytes):
            self._reduce_scatter(array, counts, out)

    def allgather(self, array: np.ndarray, counts: Sequence[int], out: np.ndarray) -> None:
        """Concatenate the parts of all ranks, on all ranks. Collective: all ranks call it.

        Parameters
        ----------
        array : ndarray (counts[rank],)
            This rank's part. It may be its range of `out`, which avoids a copy.
        counts : sequence of int
            Length of the part of each rank, in the order of the ranks; may be 0.
        out : ndarray (sum of counts,)
            All parts, in the order of the ranks.
        """
        check_array("allgather", array, writes=False)
        check_array("allgather", out)
        counts = check_parts("allgather", array, counts, out, self.rank, self.size)
        begin = sum(counts[: self.rank])
        own = out[begin : begin + counts[self.rank]]
        if overlap(array, out) and address(array) != address(own):
            raise ValueError(
                "allgather: array must be exactly "
                f"out[{begin}:{begin + counts[self.rank]}] or not overlap out; pass one of these."
            )
        with self._metered("allgather", (self.size - 1) * array.nbytes):
            self._allgather(array, counts, out)

    def barrier(self) -> None:
        """Return when every rank has called it. Collective: all ranks call it."""
        with self._metered("barrier"):
            self._barrier()

    def gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on all ranks. Collective: all ranks call it.

        In the order of the ranks. For small Python objects: they are pickled.
        """
        with self._metered("gather_object"):
            return self._gather_object(value)

    # -- messages ---------------------------------------------------------------------------------

    def send(self, array: np.ndarray, to: int, tag: int = 0) -> None:
        """Send an array to rank `to`; may block until that rank receives it."""
        self.isend(array, to, tag).wait()

    def recv(self, array: np.ndarray, source: int | None, tag: int = 0) -> int:
        """Receive into an array of exactly the length of the sent one; see `irecv`.

        Returns
        -------
        int
            The rank that has sent it.
        """
        request = self.irecv(array, source, tag)
        request.wait()
        return request.source

    def isend(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        """Start `send`; the array must not be written before the request is complete."""
        check_array("send", array, writes=False)
        to, tag = check_rank("send", to, self.size), check_tag("send", tag)
        with self._metered("isend", array.nbytes):
            request = self._isend(array, to, tag)
        return CountedRequest(request, self.traffic, "isend", self.name)

    def irecv(self, array: np.ndarray, source: int | None, tag: int = 0) -> Request:
        """Start `recv`; the array must not be accessed before the request is complete.

        Parameters
        ----------
        array : ndarray (n,)
        source : int or None
            The rank that sends. None receives the first message with the tag that no earlier
            receive takes, from any rank: `Request.source` is the one that has sent it. Messages of
            one rank arrive in the order in which they are sent; which rank comes first may differ
            from run to run.
        tag : int
        """
        check_array("recv", array)
        if source is not None:
            source = check_rank("recv", source, self.size)
        tag = check_tag("recv", tag)
        with self._metered("irecv"):
            request = self._irecv(array, source, tag)
        return CountedRequest(request, self.traffic, "irecv", self.name)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0
    ) -> Request:
        """Start all messages of one round together. Collective: all ranks call it.

        Messages from one rank to another arrive in the order in which they are listed. All ranks
        start rounds and other collectives in the same order, so that a round can be one operation
        of the device, unlike `isend` and `irecv`. If `capturable` is False, rounds are matched by
        their tags, and their order may differ.

        Parameters
        ----------
        sends : sequence of (ndarray, int)
            Arrays, and the ranks that they are sent to; not this rank itself.
        receives : sequence of (ndarray, int)
            Arrays of exactly the length of the sent ones, and the ranks that they come from.
        tag : int
            Tag of the messages, unique among pending messages.
        """
        for array, to in sends:
            check_array("exchange", array, writes=False)
            check_other("exchange", to, self.rank, self.size)
        for array, source in receives:
            check_array("exchange", array)
            check_other("exchange", source, self.rank, self.size)
        tag = check_tag("exchange", tag)
        nbytes = sum(self.traffic.count(array.nbytes) for array, _ in sends)
        with CountedCall(self.traffic, Kind.CALL, "exchange", self.name, nbytes):
            request = self._exchange(sends, receives, tag)
        return CountedRequest(request, self.traffic, "exchange", self.name)

    def _metered(self, name: str, sent: float | None = None) -> CountedCall:
        """Return the context of a call, which is counted if it sends arrays, of `sent` bytes."""
        nbytes = 0 if sent is None else self.traffic.count(sent)
        return CountedCall(self.traffic, Kind.CALL, name, self.name, nbytes)

    # -- groups -----------------------------------------------------------------------------------

    def split(self, color: int, key: int = 0) -> Communicator:
        """Return the group of the ranks with the same `color`. Collective: all ranks call it.

        Parameters
        ----------
        color : int
            Identifier of the new group, at least 0.
        key : int
            Sort key of the ranks in it; ranks with equal keys keep their order.
        """
        if color < 0:
            raise ValueError(f"split: color must be at least 0, got {color}; number groups from 0.")
        with self._metered("split"):
            group = self._split(color, key)
        group._take_ownership()
        return group

    def split_by_host(self) -> Communicator:
        """Return the group of the ranks on this rank's host. Collective: all ranks call it."""
        return self.split(self.hosts[self.rank])

    def free(self) -> None:
        """Release the resources of this group. Collective: all ranks call it.

        MPI libraries support about 2,000 groups at a time, and a group without references is
        released only when another one is split off from the same ranks. The code that calls `split`
        also calls `free`. All requests must be complete. Afterwards every call raises ValueError,
        except `free`, which has no effect; groups split off from this one remain valid.

        A communicator is also a context manager, which frees it at the end of a `with` block,
        except if an error of a single rank ends the block.
        """
        if self.freed:
            return
        self._free()
        self.freed = True
        for call in CALLS:
            setattr(self, call, partial(_refuse, call))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or issubclass(kind, AgreedError):  # otherwise not all ranks are here
            self.free()

    def observe(self, observer: Observer | None) -> None:
        """Report calls and messages of this rank to an observer, None to end it.

        Of this group and of all groups with the same `traffic`, also the messages of schedules.
        """
        self.traffic.observe(observer)

    def share(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, one object for all ranks that are threads of a process.

        Collective: all ranks call it. An error of `make` is raised on all ranks.
        """
        return make()

    def why_not_survived(self) -> str:
        """Return why the other ranks cannot continue if one fails; an empty string if they can."""
        return f"{type(self).__name__} has no group of the remaining ranks"

    def lost_ranks(self) -> bool:
        """Return whether ranks of this group have failed, as far as this rank knows.

        A call in which a rank has failed may return wrong values on some ranks where it fails on
        others: an error that they cause is one of the failure.
        """
        return False

    def shrink(self) -> Communicator:
        """Return the group of the ranks that remain, in their order.

        Collective: all remaining ranks of this group call it after `RankFailure` has been raised on
        one of them; on the others it is raised by their pending or next call. This group, and those
        split off from it, must not be used any more; if it was split off itself, other ranks go on.
        If further ranks fail meanwhile, calls on the new group raise `RankFailure` again.
        """
        raise NotImplementedError(self.why_not_survived())

    def all_remain(self) -> bool:
        """Wait for the ranks that remain; return, on all alike, whether none has failed.

        Collective: all remaining ranks call it.
        """
        self.barrier()
        return True

    @abstractmethod
    def abort(self, code: int) -> None:
        """Terminate all ranks immediately with exit status `code`."""

    # -- what an implementation writes ------------------------------------------------------------

    def _allreduce(self, array: np.ndarray, op: str) -> None:
        self._iallreduce(array, op).wait()

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _gather_object(self, value: Any) -> list[Any]: ...

    @abstractmethod
    def _iallreduce(self, array: np.ndarray, op: str) -> Request: ...

    @abstractmethod
    def _broadcast(self, array: np.ndarray, root: int) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None: ...

    @abstractmethod
    def _allgather(self, array: np.ndarray, counts: list[int], out: np.ndarray) -> None: ...

    @abstractmethod
    def _isend(self, array: np.ndarray, to: int, tag: int) -> Request: ...

    @abstractmethod
    def _irecv(self, array: np.ndarray, source: int | None, tag: int) -> Request: ...

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Request:
        requests = [self._irecv(array, source, tag) for array, source in receives]
        return Together(requests + [self._isend(array, to, tag) for array, to in sends])

    @abstractmethod
    def _split(self, color: int, key: int) -> Communicator: ...

    def _free(self) -> None:
        """Implement `free`."""

    def _take_ownership(self) -> None:
        """Take ownership of the resources of this group, which was created by `split`."""

    def _report_message(
        self, request: Request, kind: Kind, start: int, peer: int | None, tag: int, nbytes: int
    ) -> Request:
        """Return a request that reports its message, begun at `start`, once it is complete."""
        observer = self.traffic.observer
        if observer is None:
            return request

        def report(stop: int) -> None:
            other = self.members[request.source if peer is None else peer]
            observer.message(kind, self.name, start, stop, peer=other, tag=tag, nbytes=nbytes)

        return ReportedMessage(request, report)


def _refuse(call: str, *args: object, **keywords: object) -> None:
    raise ValueError(f"{call}: the communicator has been freed; create a new one with split.")


_COMMUNICATOR: ContextVar[Communicator] = ContextVar("communicator of a rank that is a thread")
"""Set by `be_rank` in the threads of ranks, and only there; no other code sets it."""


def communicator_of_thread() -> Communicator | None:
    """Return the communicator of the calling thread, if it is a rank."""
    return _COMMUNICATOR.get(None)


def be_rank(comm: Communicator) -> None:
    """Make a communicator that of the calling thread, until the thread ends."""
    _COMMUNICATOR.set(comm)
