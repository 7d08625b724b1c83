"""A mesh of ranks that do not exist, and collectives that only allocate their arrays."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np

from pydtnn.layers.collectives import AllGather, Collective, Pending, ReduceScatter
from pydtnn.utils.request import Completed, Request


class Position:
    """A rank's place in a mesh of ranks that do not exist.

    Parameters
    ----------
    shape : mapping of str to int
    position : mapping of str to int
    """

    def __init__(self, shape: Mapping[str, int], position: Mapping[str, int]) -> None:
        self.shape = {"data": 1, **shape}
        self.position = {axis: position.get(axis, 0) for axis in self.shape}

    @property
    def comm(self) -> Any:
        """Not available: nothing is gathered in a dry run."""
        raise NotImplementedError

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes along which a network is cut."""
        return tuple(axis for axis in self.shape if axis != "data")

    def group(self, axis: str) -> Any:
        """Return the group along an axis."""
        return DryGroup(self.position[axis], self.shape[axis])

    def counted(self, layer: str) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def communicate(self, asked: Any) -> Any:
        """Not available: the dry step has its own function."""
        raise NotImplementedError

    def gather(self, own: Any, part: Any) -> Any:
        """Not available: nothing is gathered in a dry run."""
        raise NotImplementedError


class DryGroup:
    """A group of ranks that records the messages of one rank.

    Parameters
    ----------
    rank, size : int

    Attributes
    ----------
    asked : list of (str, list of int)
        "allreduce" with the length of the array, or "messages" with that of each message, in B.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.asked: list[tuple[str, list[int]]] = []

    def iallreduce(self, array: Any) -> Request:
        """Record a sum."""
        self.asked.append(("allreduce", [array.nbytes]))
        return Completed()

    def exchange(self, sends: Any, receives: Any, tag: int) -> Request:
        """Record messages."""
        self.asked.append(("messages", [array.nbytes for array, _ in sends]))
        return Completed()


def start_dry(collective: Collective, group: DryGroup) -> Pending:
    """Start a collective of the library without copying arrays; others as they are.

    Parameters
    ----------
    collective : Collective
    group : DryGroup
    """
    if type(collective) is AllGather:
        own, dim, bounds = collective.array, collective.dim, collective.bounds
        whole = np.empty_like(own, shape=(*own.shape[:dim], bounds[-1], *own.shape[dim + 1 :]))
        # parts of the first axis are received in place
        received = [np.empty(whole.nbytes - own.nbytes, np.uint8)] if dim else []
        group.asked.append(("messages", [own.nbytes] * (group.size - 1)))
        return Pending(None, lambda: _release(received, whole))
    if type(collective) is ReduceScatter:
        array, dim, bounds = collective.array, collective.dim, collective.bounds
        row = array.nbytes // max(array.shape[dim], 1)
        mine = bounds[group.rank + 1] - bounds[group.rank]
        shape = (*array.shape[:dim], mine, *array.shape[dim + 1 :])
        total = np.empty_like(array, shape=shape)
        others = [np.empty((group.size - 1) * total.nbytes, np.uint8)]
        sizes = [row * (b - a) for a, b in pairwise(bounds)]
        group.asked.append(("messages", sizes[: group.rank] + sizes[group.rank + 1 :]))
        return Pending(None, lambda: _release(others, total))
    return collective.start(group, 0)


def _release(received: list[Any], result: Any) -> Any:
    """Release the memory of received parts, and return the result."""
    received.clear()
    return result
