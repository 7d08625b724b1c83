"""A layer while it is partitioned: its options on this rank, and the layouts that it requires."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydtnn.layers.base import Layer, Shape
from pydtnn.layers.communicating import MeshLike
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Cut
from pydtnn.model.partition.exchange import Spread, State
from pydtnn.model.partition.stripes import HaloExchange
from pydtnn.utils.split import even_cuts

Layout = dict[str, State]
"""Layout of an array along each axis of the mesh; axes along which it is whole may be omitted."""


class PlanError(ValueError):
    """A plan that is not possible: the message names the layer, the axis and the limit."""


@dataclass
class Draft:
    """A layer while it is partitioned.

    Attributes
    ----------
    node : Node
        The node of the whole network.
    layer : Layer
        A copy of its layer with this rank's options, not bound yet.
    inputs : list of Layout
        The layouts that it requires.
    output : Layout
    cuts : dict of str to list of Cut
        For parameters by their short names, and "channels" for running statistics.
    summed : list of str
        Axes along which the gradients of parameters are partial.
    halos : list of HaloExchange
        Extensions of the input by the rows of neighbours.
    """

    node: Node
    layer: Layer
    mesh: MeshLike
    inputs: list[Layout]
    output: Layout = field(default_factory=dict)
    cuts: dict[str, list[Cut]] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)
    halos: list[HaloExchange] = field(default_factory=list)

    @classmethod
    def of(cls, node: Node, mesh: MeshLike) -> Draft:
        """Copy the bound layer of a node."""
        return cls(node, copy.copy(node.layer), mesh, [{} for _ in node.inputs])

    @property
    def whole(self) -> Layer:
        """The layer of the whole network, bound."""
        return self.node.layer

    def ranks(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.mesh.shape[axis]

    def even(
        self, dim: int, axis: str, size: int, what: str, unit: int = 1, blocks: int = 1
    ) -> Cut:
        """Cut `size` items, in units, into even parts; in each of `blocks` so many.

        Raises
        ------
        PlanError
            If there are fewer units than ranks.
        """
        ranks = self.ranks(axis)
        if size // unit < ranks:
            raise self.refuse(
                axis, f"{what} must be at least the {ranks} ranks, got {size // unit}"
            )
        bounds = tuple(unit * bound for bound in even_cuts(size // unit, ranks))
        return Cut(dim, axis, bounds, blocks)

    def fit(self, layout: Layout, shape: Shape) -> Layout:
        """Return the same layout for an array of another shape, whole where it is too small."""
        found: Layout = {}
        for axis, state in layout.items():
            if isinstance(state, Cut) and state.dim >= 0 and state.length != shape[state.dim]:
                size = shape[state.dim]
                if size < self.ranks(axis):
                    continue
                state = Cut(state.dim, axis, tuple(even_cuts(size, self.ranks(axis))))
            found[axis] = state
        return found

    def parameter_cuts(self, axis: str) -> tuple[dict[str, list[Cut]], bool]:
        """Return how parameters are cut along an axis, and whether their gradients are partial."""
        cuts = {name: [c for c in own if c.axis == axis] for name, own in self.cuts.items()}
        return {name: own for name, own in cuts.items() if own}, axis in self.summed

    def own(self, cut: Cut) -> int:
        """Return the number of items of this rank."""
        return cut.size(self.mesh.position)

    def cut_parameters(self, dim: int, cut: Cut, *names: str) -> None:
        """Cut an axis of parameters in the same way as an array."""
        for name in names:
            self.cuts.setdefault(name, []).append(replace(cut, dim=dim))

    def require(self, axis: str, state: State) -> None:
        """Require the same layout of all inputs."""
        for layout in self.inputs:
            layout[axis] = state

    def same(self, axis: str, state: State) -> None:
        """Require a layout of all inputs, which the output has, too."""
        self.require(axis, state)
        self.output[axis] = state

    def refuse(self, axis: str, limit: str) -> PlanError:
        """Return the error for a plan that this layer cannot follow."""
        return PlanError(
            f"{self.whole.name}: cannot be partitioned along the axis {axis}="
            f"{self.ranks(axis)}: {limit}; use fewer ranks, or a plan without this layer"
        )


def part_shape(shape: Shape, layout: Layout, position: Mapping[str, int]) -> Shape:
    """Return the shape of this rank's part of an array."""
    part = list(shape)
    for state in layout.values():
        if isinstance(state, Cut) and state.dim >= 0:
            part[state.dim] = state.size(position)
    return tuple(part)


def cut_of(layouts: Sequence[Layout], axis: str) -> Cut | None:
    """Return the first cut among layouts along an axis."""
    found = (layout.get(axis, Spread.WHOLE) for layout in layouts)
    return next((state for state in found if isinstance(state, Cut)), None)


def also_cut(layout: Layout, cut: Cut) -> bool:
    """Return whether a layout cuts the same axis of the array along another axis of the mesh."""
    cuts = (state for state in layout.values() if isinstance(state, Cut))
    return any(other.dim == cut.dim and other.axis != cut.axis for other in cuts)
