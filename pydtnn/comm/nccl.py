"""The communicator over NCCL: collectives between GPUs, as work of the devices themselves.

Device arrays that are reduced, broadcast or gathered go through NCCL, on one stream of our own that
all groups share: so their kernels run in the order of the program, the same on all ranks, and never
wait for each other crosswise. Events before and after put them in order with the caller's stream,
and the host waits for nothing; so they can be captured in a CUDA graph, too.

Everything else is left to the communicator of the host, staged where the arrays are a device's.
That includes single messages from rank to rank: NCCL has neither tags nor lengths to compare, and
its send holds the stream until the other side receives, so that ranks which start their messages in
different orders, as the contract allows, would deadlock. A round of messages that all ranks
start together (`exchange`) is one group of NCCL's calls.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pydtnn.comm.agree import agree
from pydtnn.comm.checks import address, on_host
from pydtnn.comm.communicator import Communicator, Message
from pydtnn.comm.cores import shared_gpu
from pydtnn.comm.staged import Staged
from pydtnn.comm.wrapper import Wrapper
from pydtnn.utils.device import Device, DeviceArray, Event
from pydtnn.utils.request import Completed, Request

Array = np.ndarray | DeviceArray

TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
"""``ncclDataType_t`` of nccl.h, by the names that dtypes have."""

BYTES = TYPES["uint8"]
OPERATIONS = {"sum": 0, "max": 2, "min": 3}
"""``ncclRedOp_t`` of nccl.h."""

SHARING = 23000
"""Version from which several ranks may share a GPU, where NCCL_MULTI_RANK_GPU_ENABLE is 1."""


def create_nccl(host: Communicator, xp: Any = None) -> NcclCommunicator:
    """Make the communicator of all ranks' GPUs. Collective: all ranks call it.

    Parameters
    ----------
    host : Communicator
        The same ranks over MPI: they exchange NCCL's id, and what NCCL does not do.
    xp : module, optional
        What behaves like CuPy; by default it is CuPy. Each rank takes the GPU of its number on its
        host.

    Raises
    ------
    AgreedError
        On all ranks, where on any of them CuPy, NCCL or a GPU is missing, or where ranks share one.
    """
    problem: Exception | None = None
    try:
        xp = xp or _import_cupy()
        _check_library(xp)
        _choose_gpu(xp, host.local_rank)
    except (ImportError, RuntimeError, ValueError) as error:  # CuPy's own are RuntimeErrors
        problem = error
    agree(host, problem)
    shared = shared_gpu(host, xp)
    if shared and not _may_share(xp):
        problem = ValueError(
            f"nccl: {shared}, and NCCL wants one for each; start as many ranks on a host as it has "
            "GPUs, or use --comm mpi."
        )
    agree(host, problem)
    comm = NcclCommunicator(Staged(host, xp), Device(xp).stream())
    comm.connect()
    return comm


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "nccl: CuPy cannot be imported; install it with `pip install cupy-cuda13x "
            "nvidia-nccl-cu13`, or cupy-cuda12x and nvidia-nccl-cu12 for an older driver."
        ) from error
    if not cupy.cuda.is_available():
        raise ValueError("nccl: expected a usable GPU, CuPy found none; use --device cpu.")
    return cupy


def _check_library(xp: Any) -> None:
    """Refuse to go on where there is no NCCL."""
    if not hasattr(xp.cuda, "nccl"):
        import cupy.cuda.nccl  # noqa: F401  a module of its own, which nothing else imports
    if not xp.cuda.nccl.available:
        raise ImportError(
            "nccl: the NCCL library cannot be loaded; install nvidia-nccl-cu13, or -cu12 for an "
            "older driver, or use --comm mpi."
        )


def _choose_gpu(xp: Any, local_rank: int) -> None:
    """Take the GPU of this rank's number among those it sees.

    Where a launcher shows each rank its own GPU alone, that is the only one, whatever the number.
    """
    xp.cuda.Device(local_rank % xp.cuda.runtime.getDeviceCount()).use()


def _may_share(xp: Any) -> bool:
    wanted = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return wanted and xp.cuda.nccl.get_version() >= SHARING


class NcclCommunicator(Wrapper):
    """A group of GPUs, one per rank.

    NCCL's own communicator is made by `connect`, or with the first operation on device arrays: it
    takes memory, and many groups communicate through the host only.

    Parameters
    ----------
    inner : Staged
        The same ranks, through memory of the host.
    stream : cupy.cuda.Stream
        On which NCCL works; that of the group this one was split off.
    """

    inner: Staged

    def __init__(self, inner: Staged, stream: Any) -> None:
        super().__init__(inner)
        self.capturable = True
        self.device = inner.device
        self._nccl = inner.device.xp.cuda.nccl
        self.transport = f"NCCL {self.version}"
        self._stream = stream
        self._group: Any = None

    def connect(self) -> None:
        """Make NCCL's communicator, if it is not there. Collective: all ranks call it.

        It lives as long as the process. NCCL's destructor is a collective call, and waits for all
        CUDA graphs that know the communicator (``commDestroySync`` in its init.cc), while Python
        lets go of objects in an order of its own: runs would hang at their end.
        """
        if self._group is None:
            unique = self._nccl.get_unique_id() if self.rank == 0 else None
            unique = self._gather_object(unique)[0]
            self._group = self._nccl.NcclCommunicator(self.size, unique, self.rank)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    @property
    def version(self) -> str:
        """NCCL's: "2.28.9"."""
        number = self._nccl.get_version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def _split(self, color: int, key: int) -> Communicator:
        child = self.inner._split(color, key)
        assert isinstance(child, Staged)
        return NcclCommunicator(child, self._stream)

    def _allreduce(self, array: Array, op: str) -> None:
        self._iallreduce(array, op).wait()

    def _iallreduce(self, array: Array, op: str) -> Request:
        if not self._reduces(array):
            return self.inner._iallreduce(array, op)
        at, terms = address(array), (array.size, TYPES[array.dtype.name], OPERATIONS[op])
        return self._launch(lambda s: self._group.allReduce(at, at, *terms, s), array)

    def _broadcast(self, array: Array, root: int) -> None:
        if on_host(array):
            self.inner._broadcast(array, root)
            return
        at, bytes_ = address(array), array.nbytes
        self._launch(lambda s: self._group.broadcast(at, at, bytes_, BYTES, root, s), array).wait()

    def _reduce_scatter(self, array: Array, counts: list[int], out: Array) -> None:
        if not self._reduces(array):
            self.inner._reduce_scatter(array, counts, out)
            return
        at, to, terms = address(array), address(out), (TYPES[array.dtype.name], OPERATIONS["sum"])

        def even(stream: int) -> None:
            self._group.reduceScatter(at, to, counts[0], *terms, stream)

        def uneven(stream: int) -> None:
            for root, (begin, count) in enumerate(_parts(counts)):
                if count:
                    source = at + begin * array.itemsize
                    self._group.reduce(source, to, count, *terms, root, stream)

        self._launch(even if _equal(counts) else self._together(uneven), array, out).wait()

    def _allgather(self, array: Array, counts: list[int], out: Array) -> None:
        if on_host(array):
            self.inner._allgather(array, counts, out)
            return
        at, to, item = address(array), address(out), array.itemsize

        def even(stream: int) -> None:
            self._group.allGather(at, to, counts[0] * item, BYTES, stream)

        def uneven(stream: int) -> None:
            for root, (begin, count) in enumerate(_parts(counts)):
                if count:
                    into = to + begin * item
                    # What is given as the source is read on the root alone.
                    self._group.broadcast(at, into, count * item, BYTES, root, stream)

        self._launch(even if _equal(counts) else self._together(uneven), array, out).wait()

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Request:
        arrays = [array for array, _ in (*sends, *receives)]
        if any(map(on_host, arrays)):
            return self.inner._exchange(sends, receives, tag)

        def all_at_once(stream: int) -> None:
            for array, to in sends:
                if array.nbytes:
                    self._group.send(address(array), array.nbytes, BYTES, to, stream)
            for array, source in receives:
                if array.nbytes:
                    self._group.recv(address(array), array.nbytes, BYTES, source, stream)

        return self._launch(self._together(all_at_once), *arrays)

    def _reduces(self, array: Array) -> bool:
        """Whether NCCL reduces arrays of this place and type."""
        return not on_host(array) and array.dtype.name in TYPES

    def _together(self, calls: Callable[[int], None]) -> Callable[[int], None]:
        """Let several calls be one operation of NCCL, whose parts progress side by side."""

        def grouped(stream: int) -> None:
            self._nccl.groupStart()
            try:
                calls(stream)
            finally:
                self._nccl.groupEnd()

        return grouped

    def _launch(self, call: Callable[[int], None], *arrays: Array) -> Request:
        """Enqueue an operation of NCCL behind what the current stream has been given so far."""
        self.connect()
        if not any(array.nbytes for array in arrays):
            return Completed()  # on all ranks: what is empty on each of them is empty in sum
        self._stream.wait_event(self.device.mark(self.device.current))
        call(self._stream.ptr)
        return _NcclRequest(self.device, self.device.mark(self._stream), arrays)


class _NcclRequest(Request):
    """An operation of NCCL, enqueued or under way; it keeps its arrays alive."""

    def __init__(self, device: Device, end: Event, arrays: tuple[Array, ...]) -> None:
        self._device, self._end = device, end
        self._arrays: tuple[Array, ...] | None = arrays

    def wait(self) -> None:
        if self._arrays is not None:
            self._device.current.wait_event(self._end)
            self._arrays = None

    def test(self) -> bool:
        # NCCL makes progress by itself. In a capture nothing runs, and events cannot be queried.
        if self._arrays is not None and not self._device.capturing and self._end.done:
            self._arrays = None
        return self._arrays is None


def _parts(counts: list[int]) -> list[tuple[int, int]]:
    """Return where each rank's part begins, and its length."""
    return list(zip(accumulate(counts, initial=0), counts, strict=False))


def _equal(counts: list[int]) -> bool:
    return min(counts) == max(counts)
