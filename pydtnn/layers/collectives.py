"""Operations that layers ask for: sums, gathers and messages over the axes of a mesh of ranks.

A layer has no communicator. Its forward and backward passes are generators that yield a
`Collective` and are sent a `Pending`, the operation in progress; the model's loops pass both
between the layer and the ranks::

    def forward_steps(self, *xs, context):
        y, saved = self.forward(*xs, context=context)
        pending = yield AllGather(y, "filter", dim=-1, bounds=(0, 8, 16))
        ...  # kernels that run while the parts travel
        return pending.wait(), saved

All messages of an operation are started together and without waiting (`Communicator.exchange`).
Sums are added in the order of the ranks, so all ranks compute the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from pydtnn.kernels.reference.family import Array
from pydtnn.utils.request import Request

BATCH = "batch"
"""Name, beside those of the mesh's axes, of all shards of a batch: of one rank and of all ranks of
the data axis."""

PIPELINE = "pipeline"
"""Name of the axis of the mesh along which a network is cut into stages."""


class AxisGroup(Protocol):
    """The ranks along an axis: a communicator."""

    rank: int
    size: int

    def iallreduce(self, array: Any) -> Request:
        """Start to sum flat arrays, in place."""

    def exchange(self, sends: Any, receives: Any, tag: int) -> Request:
        """Start messages: pairs of a flat array and a rank."""


class Pending:
    """A collective in progress.

    Parameters
    ----------
    request : Request or None
    finish : callable
        Returns the result once the request is complete.
    """

    def __init__(self, request: Request | None, finish: Callable[[], Any]) -> None:
        self._request = request
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Wait until the operation is complete and return its result."""
        if self._finish is not None:
            if self._request is not None:
                self._request.wait()
            self._result = self._finish()
            self._request = self._finish = None
        return self._result


class Collective(ABC):
    """An operation of all ranks along axes of the mesh.

    Attributes
    ----------
    axes : tuple of str
        Names of axes; the ranks that differ only in their positions along these take part.
    """

    axes: tuple[str, ...]

    @abstractmethod
    def start(self, group: AxisGroup, tag: int) -> Pending:
        """Start the operation among the ranks of a group."""


Steps = Generator[Collective, Pending, Any]
"""A layer's forward or backward pass that yields collectives."""


class Sum(Collective):
    """Sum of small arrays, such as statistics.

    Parameters
    ----------
    array : Array, shape (n,)
    axes : tuple of str
        May contain `BATCH`.
    """

    def __init__(self, array: Array, axes: tuple[str, ...]) -> None:
        self.array, self.axes = array, axes

    def start(self, group: AxisGroup, tag: int) -> Pending:
        total = self.array.copy()
        return Pending(group.iallreduce(total), lambda: total)


class AllReduce(Collective):
    """Sum of arrays of equal shape; the sum replaces the array.

    Parameters
    ----------
    array : Array
    axis : str
    """

    def __init__(self, array: Array, axis: str) -> None:
        self.array, self.axes = contiguous(array), (axis,)

    def start(self, group: AxisGroup, tag: int) -> Pending:
        return Pending(group.iallreduce(self.array.reshape(-1)), lambda: self.array)


class AllGather(Collective):
    """Concatenation of the parts of all ranks along one axis of the arrays.

    Parameters
    ----------
    array : Array
        This rank's part.
    axis : str
    dim : int
        Axis of the arrays, including the batch.
    bounds : sequence of int
        Part r is ``bounds[r]`` to ``bounds[r + 1]``.
    """

    def __init__(self, array: Array, axis: str, *, dim: int, bounds: Sequence[int]) -> None:
        self.array, self.axes = array, (axis,)
        self.dim, self.bounds = dim % array.ndim, tuple(bounds)

    def start(self, group: AxisGroup, tag: int) -> Pending:
        own, parts = contiguous(self.array), parts_of(self.bounds, self.dim)
        shape = (*own.shape[: self.dim], self.bounds[-1], *own.shape[self.dim + 1 :])
        others = other_ranks(group)
        whole = np.empty_like(own, shape=shape)
        # parts of the first axis are contiguous in the result
        received = {
            r: whole[parts[r]] if self.dim == 0 else np.empty_like(own, shape=part)
            for r, part in ((r, shape_of(whole, parts[r])) for r in others)
        }
        request = exchange(group, dict.fromkeys(others, own), received, tag)

        def finish() -> Array:
            whole[parts[group.rank]] = own
            for r, part in received.items() if self.dim else ():
                whole[parts[r]] = part
            return whole

        return Pending(request, finish)


class ReduceScatter(Collective):
    """Sum of arrays of equal shape, of which each rank receives a part.

    Parameters
    ----------
    array : Array
    axis, dim, bounds
        See `AllGather`.
    """

    def __init__(self, array: Array, axis: str, *, dim: int, bounds: Sequence[int]) -> None:
        self.array, self.axes = array, (axis,)
        self.dim, self.bounds = dim % array.ndim, tuple(bounds)

    def start(self, group: AxisGroup, tag: int) -> Pending:
        parts, others = parts_of(self.bounds, self.dim), other_ranks(group)
        own = self.array[parts[group.rank]].copy()
        received = {r: np.empty_like(own) for r in others}
        request = exchange(group, {r: self.array[parts[r]] for r in others}, received, tag)

        def finish() -> Array:
            received[group.rank] = own
            total = received[0]
            for r in range(1, group.size):
                total += received[r]
            return total

        return Pending(request, finish)


Side = tuple[int, Sequence[int]]
"""An axis of an array, and where it is cut: see `AllGather`."""


class Redistribute(Collective):
    """Change of the axis along which an array is cut: each rank sends a block to each other rank.

    Parameters
    ----------
    array : Array
        This rank's part along axis `source`.
    axis : str
    source, target : (int, sequence of int)
        Axis of the arrays and bounds, see `AllGather`, before and after.
    """

    def __init__(self, array: Array, axis: str, *, source: Side, target: Side) -> None:
        self.array, self.axes = array, (axis,)
        self.source, self.target = source, target

    def start(self, group: AxisGroup, tag: int) -> Pending:
        (dim, bounds), (to, cuts) = self.source, self.target
        dim, to = dim % self.array.ndim, to % self.array.ndim
        shape = list(self.array.shape)
        shape[dim] = bounds[-1]
        shape[to] = cuts[group.rank + 1] - cuts[group.rank]
        result = np.empty_like(self.array, shape=tuple(shape))
        if dim == to:
            blocks = overlaps(bounds, cuts, group.rank, dim)
            places = overlaps(cuts, bounds, group.rank, dim)
        else:
            blocks, places = parts_of(cuts, to), parts_of(bounds, dim)
        others = other_ranks(group)
        received = {r: np.empty_like(result, shape=shape_of(result, places[r])) for r in others}
        request = exchange(group, {r: self.array[blocks[r]] for r in others}, received, tag)

        def finish() -> Array:
            result[places[group.rank]] = self.array[blocks[group.rank]]
            for r, block in received.items():
                result[places[r]] = block
            return result

        return Pending(request, finish)


class Messages(Collective):
    """Messages between single ranks, such as halos.

    Parameters
    ----------
    sends : sequence of (Array, int)
        Arrays, and the positions along the axis that they are sent to.
    receives : sequence of (Array, int)
        New arrays for the messages, and the positions that they come from.
    axis : str

    Notes
    -----
    The result is the list of received arrays.
    """

    def __init__(
        self,
        sends: Sequence[tuple[Array, int]],
        receives: Sequence[tuple[Array, int]],
        axis: str,
    ) -> None:
        self.sends, self.receives, self.axes = sends, receives, (axis,)

    def start(self, group: AxisGroup, tag: int) -> Pending:
        sends = [(contiguous(array).reshape(-1), r) for array, r in self.sends]
        receives = [(array.reshape(-1), r) for array, r in self.receives]
        request = group.exchange(sends, receives, tag)
        return Pending(request, lambda: [array for array, _ in self.receives])


def contiguous(array: Array) -> Array:
    """Return the array itself if its elements are contiguous in C order, otherwise a copy."""
    return array if array.flags.c_contiguous else array.copy()


def exchange(
    group: AxisGroup, sends: Mapping[int, Array], receives: Mapping[int, Array], tag: int
) -> Request:
    """Start to send an array to each of some ranks, and to receive one of each of some."""
    return group.exchange(
        [(contiguous(array).reshape(-1), r) for r, array in sends.items()],
        [(array.reshape(-1), r) for r, array in receives.items()],
        tag,
    )


def parts_of(bounds: Sequence[int], dim: int) -> list[tuple[slice, ...]]:
    """Return the index of each rank's part of an array that is cut along axis `dim`."""
    return [(*(slice(None),) * dim, slice(a, b)) for a, b in pairwise(bounds)]


def overlaps(
    bounds: Sequence[int], others: Sequence[int], rank: int, dim: int
) -> list[tuple[slice, ...]]:
    """Return the index, in a rank's part of an array, of what each part of another cut has of it.

    >>> overlaps((0, 4, 6), (0, 3, 6), 0, 0)
    [(slice(0, 3, None),), (slice(3, 4, None),)]
    """
    first, last = bounds[rank], bounds[rank + 1]
    return [
        (*(slice(None),) * dim, slice(*(min(max(n, first), last) - first for n in pair)))
        for pair in pairwise(others)
    ]


def shape_of(array: Array, index: tuple[slice, ...]) -> tuple[int, ...]:
    """Return the shape of a part of an array, whose index has bounds in its last entry only."""
    dim, shape = len(index) - 1, array.shape
    return *shape[:dim], index[-1].stop - index[-1].start, *shape[dim + 1 :]


def other_ranks(group: AxisGroup) -> list[int]:
    """Return the other ranks, starting with the next, so that ranks begin with different ones."""
    return [(group.rank + shift) % group.size for shift in range(1, group.size)]
