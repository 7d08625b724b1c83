"""Communicators of the host for device arrays: by way of pinned memory, or handed over as they are.

Staging copies an array to pinned memory of the host, lets the communicator of the host do its work
there, and copies the result back. The copies go by streams of their own, so that they and the
messages run while the device computes. A CUDA-aware MPI does all that by itself; it only has to be
called after the device has written what it reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pydtnn.comm.arrays import on_host
from pydtnn.comm.communicator import Communicator, Completed, Request
from pydtnn.comm.wrapper import Wrapper
from pydtnn.utils.device import Device, DeviceArray, Event

Array = np.ndarray | DeviceArray


class Staged(Wrapper):
    """Move device arrays through pinned memory; host arrays go as they are.

    Ranks must start collectives in one order, and messages of one tag arrive in the order in which
    they are sent. But an operation can start only when its copy has arrived, at a time that differs
    from rank to rank. So operations wait in one queue and leave it in the order in which they were
    called. Waiting for one starts all of them first: that takes nothing but the end of
    copies under way, so no rank can be kept by another.

    Parameters
    ----------
    inner : Communicator
        Of the host: MPI, threads.
    xp : module
        CuPy, or what behaves like it.
    device : Device, optional
        Streams to share with another communicator; by default new ones.
    """

    def __init__(self, inner: Communicator, xp: Any, device: Device | None = None) -> None:
        super().__init__(inner)
        self.capturable = False
        self.device = device or Device(xp)
        self._queue: deque[_Operation] = deque()

    def wrapped(self, group: Communicator) -> Communicator:
        """Stage what a group says, too."""
        staged = Staged(group, self.device.xp, self.device)
        staged._queue = self._queue  # waiting on one group starts the operations of all
        return staged

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call without device arrays, after those that came before it."""
        self.start_all()
        return call(*args)

    def _free(self) -> None:
        self.start_all()
        super()._free()

    def start_ready(self) -> None:
        """Start the operations whose copies have arrived, in order."""
        while self._queue and self._queue[0].is_ready():
            self._queue.popleft().start()

    def start_all(self) -> None:
        """Start all operations, and wait for the copies where these are on their way."""
        while self._queue:
            operation = self._queue.popleft()
            operation.wait_ready()
            operation.start()

    def _allreduce(self, array: Array, op: str) -> None:
        self._later(lambda a: _now(self.inner._allreduce, a, op), [array], [array]).wait()

    def _iallreduce(self, array: Array, op: str) -> Request:
        return self._later(lambda a: self.inner._iallreduce(a, op), [array], [array])

    def _broadcast(self, array: Array, root: int) -> None:
        reads, writes = ([array], []) if root == self.rank else ([], [array])
        self._later(lambda a: _now(self.inner._broadcast, a, root), reads, writes).wait()

    def _reduce_scatter(self, array: Array, counts: list[int], out: Array) -> None:
        def start(a: np.ndarray, b: np.ndarray) -> Request:
            return _now(self.inner._reduce_scatter, a, counts, b)

        self._later(start, [array], [out]).wait()

    def _allgather(self, array: Array, counts: list[int], out: Array) -> None:
        def start(a: np.ndarray, b: np.ndarray) -> Request:
            return _now(self.inner._allgather, a, counts, b)

        self._later(start, [array], [out]).wait()

    def _isend(self, array: Array, to: int, tag: int) -> Request:
        return self._later(lambda a: self.inner._isend(a, to, tag), [array], [])

    def _irecv(self, array: Array, source: int, tag: int) -> Request:
        if source == self.rank:  # a message to oneself keeps its place: see below
            return self._later(lambda a: self.inner._irecv(a, source, tag), [], [array])
        # It waits for no copy, so it need not queue; and being early spares MPI a copy of its own.
        # But Open MPI cuts off what is too long for oneself, unasked, if the receive came first.
        operation = _Operation(self, lambda a: self.inner._irecv(a, source, tag), [], [array])
        operation.start()
        return operation

    def _later(
        self, call: Callable[..., Request], reads: Sequence[Array], writes: Sequence[Array]
    ) -> Request:
        """Queue an operation, and start what can be started."""
        operation = _Operation(self, call, reads, writes)
        self._queue.append(operation)
        self.start_ready()
        return operation


class _Operation(Request):
    """One operation: its arrays are copied to the host, it is carried out, they are copied back.

    Parameters
    ----------
    comm : Staged
    call : callable
        Starts the operation, given the arrays that it reads and then those that it writes, without
        those that it reads too.
    reads, writes : sequence of arrays
    """

    def __init__(
        self,
        comm: Staged,
        call: Callable[..., Request],
        reads: Sequence[Array],
        writes: Sequence[Array],
    ) -> None:
        self._comm, self._call, self._writes = comm, call, writes
        self._posted: Event | None = None
        self._copied: Event | None = None
        device = comm.device
        arrays = [*reads, *(array for array in writes if not _among(array, reads))]
        if not all(map(on_host, arrays)):
            self._posted = device.mark(device.current)
        self._mirrors: dict[int, np.ndarray] = {}
        for position, array in enumerate(arrays):
            mirror = array
            if not on_host(array):
                if position < len(reads):
                    mirror, self._copied = device.download(array, self._posted)
                else:
                    mirror = device.pinned(array)
            self._mirrors[id(array)] = mirror
        self._arrays = arrays  # kept alive: copies under way must not read what is others' by then
        self._request: Request | None = None
        self._done = False

    def is_ready(self) -> bool:
        """Whether what is read has arrived at the host."""
        return self._copied is None or bool(self._copied.done)

    def wait_ready(self) -> None:
        """Wait until what is read has arrived at the host."""
        if self._copied is not None:
            self._copied.synchronize()

    def start(self) -> None:
        """Start the operation on the host."""
        self._request = self._call(*self._mirrors.values())

    def wait(self) -> None:
        if not self._done:
            self._comm.start_all()  # also what this operation waits for: a send to oneself, say
            assert self._request is not None
            self._request.wait()
            self._finish()

    def test(self) -> bool:
        self._comm.start_ready()
        if not self._done and self._request is not None and self._request.test():
            self._finish()
        return self._done

    def _finish(self) -> None:
        self._done = True
        for array in self._writes:
            if not on_host(array):
                self._comm.device.upload(self._mirrors[id(array)], array, self._posted)
        self._mirrors, self._arrays = {}, []


def _now(call: Callable[..., None], *args: Any) -> Request:
    """Make a call that returns when it is done."""
    call(*args)
    return Completed()


def _among(array: Array, others: Sequence[Array]) -> bool:
    return any(array is other for other in others)


class Handed(Wrapper):
    """Hand device arrays over to an MPI that takes them: the user says that it does.

    MPI knows nothing of streams. So before a call the host waits until the device has done what
    the current stream was given; afterwards nothing has to be waited for.

    Parameters
    ----------
    inner : Communicator
    xp : module
        CuPy, or what behaves like it.
    """

    def __init__(self, inner: Communicator, xp: Any) -> None:
        super().__init__(inner)
        self.capturable = False
        self.xp = xp

    def wrapped(self, group: Communicator) -> Communicator:
        """Hand over to a group, too."""
        return Handed(group, self.xp)

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call once the device has written its arrays."""
        self._settle(args)
        return call(*args)

    def started(self, what: str, call: Callable[..., Request], *args: Any) -> Request:
        """Start an operation once the device has written its arrays."""
        self._settle(args)
        return call(*args)

    def _settle(self, args: Sequence[Any]) -> None:
        if any(hasattr(arg, "__cuda_array_interface__") for arg in args):
            self.xp.cuda.get_current_stream().synchronize()
