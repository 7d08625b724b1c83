"""Communicators of the host for device arrays: by way of pinned memory, or a CUDA-aware MPI.

Staging copies an array to pinned memory of the host, lets the communicator of the host do its work
there, and copies the result back. The copies go by streams of their own, so that they and the
messages run while the device computes. A CUDA-aware MPI does all that by itself; it only has to be
called after the device has written what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pydtnn.comm.arrays import on_host
from pydtnn.comm.chain import Chain, Queue
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
        self._queue = Queue()

    def wrapped(self, group: Communicator) -> Communicator:
        """Stage what a group says, too."""
        staged = Staged(group, self.device.xp, self.device)
        staged._queue = self._queue  # waiting on one group starts the operations of all
        return staged

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call without device arrays, after those that came before it."""
        self._queue.wait()
        return call(*args)

    def _free(self) -> None:
        self._queue.wait()
        super()._free()

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
        steps = self._carry_out(lambda a: self.inner._irecv(a, source, tag), [], [array], False)
        return Chain(steps, self._queue, in_turn=False)

    def _later(
        self, call: Callable[..., Request], reads: Sequence[Array], writes: Sequence[Array]
    ) -> Request:
        """Queue an operation, and start what can be started."""
        return Chain(self._carry_out(call, reads, writes), self._queue)

    def _carry_out(
        self,
        call: Callable[..., Request],
        reads: Sequence[Array],
        writes: Sequence[Array],
        waits: bool = True,
    ) -> Iterator[Request]:
        """Copy arrays to the host, carry an operation out there, and copy them back.

        Parameters
        ----------
        call : callable
            Starts the operation, given the arrays that it reads and then those that it writes,
            without those that it reads too.
        reads, writes : sequence of arrays
            Kept alive: copies under way must not read what is others' by then.
        waits : bool
            Whether it waits for the copies, and its turn.
        """
        device = self.device
        arrays = [*reads, *(array for array in writes if not _among(array, reads))]
        posted = None if all(map(on_host, arrays)) else device.mark(device.current)
        copied: Event | None = None
        mirrors: dict[int, np.ndarray] = {}
        for position, array in enumerate(arrays):
            mirrors[id(array)] = array
            if not on_host(array) and position < len(reads):
                mirrors[id(array)], copied = device.download(array, posted)
            elif not on_host(array):
                mirrors[id(array)] = device.pinned(array)
        if waits:
            yield _Copy(copied)
        yield call(*mirrors.values())
        for array in writes:
            if not on_host(array):
                device.upload(mirrors[id(array)], array, posted)


class _Copy(Request):
    """Copies to the host, up to an event."""

    def __init__(self, end: Event | None) -> None:
        self._end = end

    def wait(self) -> None:
        if self._end is not None:
            self._end.synchronize()

    def test(self) -> bool:
        return self._end is None or bool(self._end.done)


def _now(call: Callable[..., None], *args: Any) -> Request:
    """Make a call that returns when it is done."""
    call(*args)
    return Completed()


def _among(array: Array, others: Sequence[Array]) -> bool:
    return any(array is other for other in others)


class CudaAware(Wrapper):
    """Pass device arrays on to a CUDA-aware MPI: the user says that it is one.

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
        """Pass on to a group, too."""
        return CudaAware(group, self.xp)

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call once the device has written its arrays."""
        if any(hasattr(arg, "__cuda_array_interface__") for arg in args):
            self.xp.cuda.get_current_stream().synchronize()
        return call(*args)

    started = called
