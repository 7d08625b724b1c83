"""Collectives without ranks, for the dry run that predicts memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydtnn.layers.collectives import Collective, Pending
from pydtnn.model.partition.draft import MeshLike


class DryGroup:
    """A group of ranks along an axis in which nothing is sent.

    Parameters
    ----------
    rank, size : int
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def iallreduce(self, array: Any) -> DryGroup:
        """Do nothing."""
        return self

    def exchange(self, sends: Any, receives: Any, tag: int) -> DryGroup:
        """Do nothing."""
        return self

    def wait(self) -> None:
        """Do nothing: the groups are requests, too."""


class DryMesh:
    """A mesh whose collectives allocate their arrays and send nothing.

    Parameters
    ----------
    mesh : MeshLike
    """

    def __init__(self, mesh: MeshLike) -> None:
        self.shape, self.position = mesh.shape, mesh.position

    def communicate(self, asked: Sequence[tuple[Any, Collective]]) -> list[Pending]:
        """Start collectives; see `pydtnn.parallel.Mesh.communicate`."""
        return [collective.start(self._group(collective), 0) for _, collective in asked]

    def _group(self, collective: Collective) -> DryGroup:
        axis = collective.axes[-1]
        return DryGroup(self.position.get(axis, 0), self.shape.get(axis, 1))
