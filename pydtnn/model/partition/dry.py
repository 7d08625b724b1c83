"""Collectives without ranks, for the dry run that predicts memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydtnn.layers.collectives import Collective, Pending
from pydtnn.model.partition.draft import MeshLike


class Volume(NamedTuple):
    """Messages and bytes that a rank sends, counted as by `pydtnn.comm.metered`."""

    messages: int
    nbytes: int


class DryGroup:
    """A group of ranks along an axis in which messages are counted but not sent.

    Parameters
    ----------
    rank, size : int

    Attributes
    ----------
    sent : Volume
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent = Volume(0, 0)

    def iallreduce(self, array: Any) -> DryGroup:
        """Count the minimum of algorithms for an allreduce."""
        if self.size > 1:
            self._count(1, round(2 * (self.size - 1) / self.size * array.nbytes))
        return self

    def exchange(self, sends: Any, receives: Any, tag: int) -> DryGroup:
        """Count messages."""
        self._count(len(sends), sum(array.nbytes for array, _ in sends))
        return self

    def _count(self, messages: int, nbytes: int) -> None:
        self.sent = Volume(self.sent.messages + messages, self.sent.nbytes + nbytes)

    def wait(self) -> None:
        """Do nothing: the groups are requests, too."""


class DryMesh:
    """A mesh whose collectives allocate their arrays and send nothing.

    Parameters
    ----------
    mesh : MeshLike

    Attributes
    ----------
    sent : dict of str to Volume
        Messages that this rank would have sent, by the name of the layer.
    """

    def __init__(self, mesh: MeshLike) -> None:
        self.shape, self.position = mesh.shape, mesh.position
        self.sent: dict[str, Volume] = {}

    def communicate(self, asked: Sequence[tuple[Any, Collective]]) -> list[Pending]:
        """Start collectives; see `pydtnn.parallel.Mesh.communicate`."""
        return [self._start(node.name, collective) for node, collective in asked]

    def _start(self, layer: str, collective: Collective) -> Pending:
        for axis in collective.axes:
            group = DryGroup(self.position.get(axis, 0), self.shape.get(axis, 1))
            pending = collective.start(group, 0)
            before = self.sent.get(layer, Volume(0, 0))
            self.sent[layer] = Volume(*map(sum, zip(before, group.sent, strict=True)))
        return pending
