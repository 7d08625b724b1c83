"""Host communicators for device arrays: through pinned memory, or by a CUDA-aware MPI.

Staging copies an array to pinned host memory, applies the host communicator to that copy, and
copies the result back. The copies use separate streams, so that copies and messages overlap with
the computation of the device. A CUDA-aware MPI does all of this internally; it only must be called
after the device has written the arrays that the call reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pydtnn.comm.checks import on_host
from pydtnn.comm.communicator import Communicator
from pydtnn.comm.wrapper import Wrapper
from pydtnn.utils.device import Device, DeviceArray, Event
from pydtnn.utils.request import Chain, Completed, Queue, Request

Array = np.ndarray | DeviceArray


class Staged(Wrapper):
    """Communicate device arrays through pinned memory; host arrays are passed on unchanged.

    Ranks must start collectives in the same order, and messages of one tag arrive in the order in
    which they are sent. But an operation can start only after its copy is complete, at a time that
    differs between ranks. Hence operations wait in one queue and start in the order in which they
    were called. Waiting for one operation starts all queued operations first: that requires only
    the end of pending copies, so no rank blocks another.

    Parameters
    ----------
    inner : Communicator
        A communicator of the host: MPI or threads.
    xp : module
        CuPy or a compatible module.
    device : Device, optional
        Streams shared with another communicator; by default new ones.
    """

    def __init__(self, inner: Communicator, xp: Any, device: Device | None = None) -> None:
        super().__init__(inner)
        self.capturable, self.transport = False, "MPI, through pinned memory of the host"
        self.device = device or Device(xp)
        self._queue = Queue()
        self._from_any = False  # whether a message of any rank has been received

    @property
    def summing(self) -> Communicator:
        return self.inner

    def wrapped(self, group: Communicator) -> Communicator:
        """Stage the arrays of a group as well."""
        staged = Staged(group, self.device.xp, self.device)
        staged._queue = self._queue  # waiting on one group starts the operations of all
        return staged

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call without device arrays after all operations called before it."""
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
        call = self.inner._reduce_scatter
        self._later(lambda a, b: _now(call, a, counts, b), [array], [out]).wait()

    def _allgather(self, array: Array, counts: list[int], out: Array) -> None:
        call = self.inner._allgather
        self._later(lambda a, b: _now(call, a, counts, b), [array], [out]).wait()

    def _isend(self, array: Array, to: int, tag: int) -> Request:
        return self._later(lambda a: self.inner._isend(a, to, tag), [array], [])

    def _irecv(self, array: Array, source: int | None, tag: int) -> Request:
        self._from_any |= source is None
        if source == self.rank or self._from_any:  # in the order of the calls: see below
            return self._later(lambda a: self.inner._irecv(a, source, tag), [], [array])
        # It waits for no copy, so it need not queue; an early receive saves MPI an internal copy.
        # But Open MPI truncates a message from a rank to itself silently if the receive is first,
        # and receives from any rank and from one of them take messages in the order of the calls.
        steps = self._carry_out(lambda a: self.inner._irecv(a, source, tag), [], [array], False)
        return Chain(steps, self._queue, in_turn=False)

    def _later(
        self, call: Callable[..., Request], reads: Sequence[Array], writes: Sequence[Array]
    ) -> Request:
        """Append an operation to the queue, and start those that are ready."""
        return Chain(self._carry_out(call, reads, writes), self._queue)

    def _carry_out(
        self,
        call: Callable[..., Request],
        reads: Sequence[Array],
        writes: Sequence[Array],
        waits: bool = True,
    ) -> Iterator[Request]:
        """Copy arrays to the host, carry out an operation there, and copy the results back.

        Parameters
        ----------
        call : callable
            Starts the operation, given the host copies of `reads`, then those of `writes` that are
            not in `reads`.
        reads, writes : sequence of arrays
            References are held until the end, so that pending copies never use freed memory.
        waits : bool
            Whether it waits for the copies, and for its turn in the queue.
        """
        device = self.device
        written_only = (a for a in writes if not any(a is other for other in reads))
        arrays = [*reads, *written_only]
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
    """The copies to the host before an event."""

    def __init__(self, end: Event | None) -> None:
        self._end = end

    def wait(self) -> None:
        if self._end is not None:
            self._end.synchronize()

    def test(self) -> bool:
        return self._end is None or bool(self._end.done)


def _now(call: Callable[..., None], *args: Any) -> Request:
    """Make a blocking call and return a completed request."""
    call(*args)
    return Completed()


class CudaAware(Wrapper):
    """Pass device arrays to an MPI library that the user declares to be CUDA-aware.

    MPI does not use CUDA streams. So before a call the host waits until the device has completed
    the work on the current stream; after the call no wait is needed.

    Parameters
    ----------
    inner : Communicator
    xp : module
        CuPy or a compatible module.
    """

    def __init__(self, inner: Communicator, xp: Any) -> None:
        super().__init__(inner)
        self.capturable, self.transport = False, "CUDA-aware MPI"
        self.xp = xp

    def wrapped(self, group: Communicator) -> Communicator:
        """Wrap a group in the same way."""
        return CudaAware(group, self.xp)

    def called(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call after the device has written its arrays."""
        if any(hasattr(arg, "__cuda_array_interface__") for arg in args):
            self.xp.cuda.get_current_stream().synchronize()
        return call(*args)

    started = called
