"""Whole arrays of a network that is partitioned over the ranks of a mesh.

Arrays outside of training (checkpoints, weights, results) have the names and shapes of the serial
network, so that they do not depend on the mesh or on how the network is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.layers.parameters import Parameter, ParameterPart
from pydtnn.layers.statistics import RUNNING, Statistic
from pydtnn.model.load_report import LoadReport, compare, describe
from pydtnn.model.pieces import Piece, full_piece, part_piece

if TYPE_CHECKING:
    from pydtnn.layers.communicating import MeshLike


class FullArrays:
    """Conversion between the arrays of this rank and those of the serial network.

    A name is that of a parameter, or of a layer and "running_mean" or "running_variance". In a
    state it may follow a prefix and a slash: "velocity/fc.w", "average/norm.running_mean".

    Parameters
    ----------
    mesh : Mesh or None
        None: this rank has the whole network.
    parameters : iterable of Parameter
    statistics : iterable of Statistic
    others : mapping of str to tuple of int, optional
        Names and shapes of all arrays of the serial network in its order, if this rank has only
        some of them.

    Attributes
    ----------
    parts : dict of str to Part
        Arrays of which this rank has a part.
    shapes : dict of str to tuple of int
        Shapes of all arrays of the serial network.
    """

    def __init__(
        self,
        mesh: MeshLike | None,
        parameters: Iterable[Parameter],
        statistics: Iterable[Statistic],
        others: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.mesh = mesh
        own = [(p.name, p.shape, p.part) for p in parameters]
        own += [(f"{s.name}.{what}", (s.channels,), s.part) for s in statistics for what in RUNNING]
        self.parts = {name: part for name, _, part in own if part is not None}
        self._own = {name: shape for name, shape, _ in own}
        self.shapes = {name: shape if part is None else part.shape for name, shape, part in own}
        if others is not None:
            self.shapes = {**others}

    @property
    def size(self) -> int:
        """Number of parameters of the whole network."""
        shapes = self.shapes.items()
        return sum(prod(shape) for name, shape in shapes if name.rpartition(".")[2] not in RUNNING)

    @property
    def distributed(self) -> bool:
        """Whether ranks may have parts of the network."""
        return self.mesh is not None and bool(self.mesh.model_axes)

    def gather(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Replace arrays of parts by whole arrays, and add those that only other ranks have.

        Collective if there is a mesh: all ranks of it call it. Arrays that do not have the shapes
        of the parts on all ranks, such as factors of compressed gradients, are not changed.
        """
        if self.mesh is None or not self.mesh.model_axes:
            return {**state}
        fits = {name: self._fits(name, value) for name, value in state.items()}
        everywhere = self.mesh.comm.gather_object((fits, [*self.parts]))
        kept = {
            name
            for name in dict.fromkeys(name for own, _ in everywhere for name in own)
            for own, parts in everywhere
            if not own.get(name, self._known(name) not in parts)
        }
        result = {**state}
        for name in sorted(state):  # buckets, and so their order, may differ between ranks
            part = self._part(name)
            if part is not None and name not in kept:
                result[name] = self.mesh.gather(state[name], part)
        for axis in self.mesh.model_axes:
            result = self._complete(self.mesh.group(axis), result, kept)
        return result

    def piece(self, name: str, values: np.ndarray) -> Piece:
        """Return the elements of the whole network's array that an array of a state contains."""
        values = np.ascontiguousarray(values).reshape(np.shape(values))
        if self.mesh is not None and self._part(name) is not None and self._fits(name, values):
            return part_piece(name, values, self._part(name), self.mesh.position)
        return full_piece(name, values)

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype
    ) -> tuple[np.ndarray, Piece]:
        """Return an array for this rank's part of a state's array, and the piece that fills it.

        If the shape is not that of a whole array of which this rank has a part, all of it.
        """
        part = self._part(name)
        if part is None or self.mesh is None or shape != part.shape:
            values = np.empty(shape, dtype)
            return values, full_piece(name, values)
        values = np.empty(self._own[self._known(name) or ""], dtype)
        return values, part_piece(name, values, part, self.mesh.position)

    def fits(self, name: str, values: np.ndarray) -> bool:
        """Return whether an array of a state is whole, or this rank's part of a whole one."""
        part = self._part(name)
        return part is None or values.shape == part.shape or self._fits(name, values)

    def belongs_elsewhere(self, name: str) -> bool:
        """Return whether an entry of a state is an array that only other ranks have."""
        known = self._known(name)
        return known is not None and known not in self._own

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's parts of the result of `gather`, without arrays of other ranks."""
        result = {}
        for name, value in state.items():
            known, part = self._known(name), self._part(name)
            if known is not None and known not in self._own:
                continue
            if part is not None and self.mesh is not None and np.shape(value) == part.shape:
                value = part.take(np.asarray(value), self.mesh.position)
            result[name] = value
        return result

    def compare(self, given: Mapping[str, Any]) -> LoadReport:
        """Compare names and shapes of the whole network's arrays with given ones."""
        return compare(self._shaped(), given)

    def describe(self) -> str:
        """Return the number of parameters of the whole network, in words."""
        return describe(self._shaped())

    def _shaped(self) -> dict[str, np.ndarray]:
        """Return arrays of the shapes of the whole network's, without memory."""
        return {name: np.broadcast_to(0.0, shape) for name, shape in self.shapes.items()}

    def _known(self, name: str) -> str | None:
        """Return the name of an array of the network in that of a state's entry, if any."""
        while name not in self.shapes:
            _, slash, name = name.partition("/")
            if not slash:
                return None
        return name

    def _part(self, name: str) -> ParameterPart | None:
        return self.parts.get(self._known(name) or "")

    def _fits(self, name: str, value: Any) -> bool:
        """Return whether a value has the shape of this rank's array of this name."""
        known = self._known(name)
        return isinstance(value, np.ndarray) and value.shape == self._own.get(known or "")

    def _complete(self, group: Any, state: dict[str, Any], kept: Collection[str]) -> dict[str, Any]:
        """Add the arrays that only other ranks of a group have, in the order of the network."""
        own = {
            name: (value.shape, value.dtype)
            for name, value in state.items()
            if isinstance(value, np.ndarray) and name not in kept
        }
        everywhere = group.gather_object(own)
        if all(other.keys() == own.keys() for other in everywhere):
            return state
        result = {**state}
        for root, theirs in enumerate(everywhere):
            for name, (shape, dtype) in theirs.items():
                if any(name in before for before in everywhere[:root]):
                    continue
                array = np.empty(shape, dtype)
                if root == group.rank:
                    array[...] = state[name]
                group.broadcast(array.reshape(-1), root)
                result.setdefault(name, array)
        order = {name: place for place, name in enumerate(self.shapes)}
        last = len(order)
        return dict(sorted(result.items(), key=lambda e: order.get(self._known(e[0]) or "", last)))
