"""The ways to cut each layer of a network along an axis of the mesh, with their times.

The rules are those by which training cuts a network (`pydtnn.model.partition.rules`): a layer with
a strategy, and layers that follow the layouts of their inputs. Where a layout is not the one that a
layer requires, the exchange in between has a time, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any

from pydtnn.kernels.dry import dry_backend
from pydtnn.layers.activation import Activation
from pydtnn.layers.base import Layer, Shape
from pydtnn.layers.communicating import Communicating
from pydtnn.layers.dropout import Dropout
from pydtnn.layers.node import Node, nodes
from pydtnn.layers.norm import BatchNorm
from pydtnn.layers.parameters import Cut
from pydtnn.layers.reshape import Flatten, Identity
from pydtnn.model.graph import Graph, shapes_of
from pydtnn.model.memory import DryMesh
from pydtnn.model.partition.draft import Draft, Layout, PlanError, part_shape
from pydtnn.model.partition.exchange import SAMPLES, Spread, State
from pydtnn.model.partition.rules import STRATEGIES, apply_strategy, follow, kind_of
from pydtnn.tools.perfmodel.compute import Label
from pydtnn.tools.perfmodel.dry_step import MIN_COUNTED_BYTES, inner_position
from pydtnn.tools.perfmodel.messages import MessageCosts, duration
from pydtnn.tools.perfmodel.outline import Affine, Start
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.perfmodel.search.solver import State as UnitState
from pydtnn.tools.perfmodel.search.solver import Unit, UnitOption

AXIS = "model"
"""Axis of the mesh along which layers are cut."""

SEARCHED = ("filter", "channel", "spatial", "data")
"""Strategies among which a search chooses; stripes of columns are as fast as those of rows."""

LONG_MESSAGE_BYTES = 1 << 22
"""Bytes of the message that gives the time per byte of sums of gradients."""

IN_PLACE = (Activation, Dropout, Flatten, Identity)
"""Layers whose outputs are not stored besides their inputs."""


class LayerOptions:
    """Options of the units of a network for `solve`.

    Parameters
    ----------
    projector : Projector
        Network, batch, platform and costs of compute.
    messages : MessageCosts
        Of a run with the axes "data" and `AXIS`.

    Attributes
    ----------
    units : list of Unit
        Inputs of the network, its layers, and its outputs, which are whole on all ranks.
    exposed : float, default 1
        Share of the sums of gradients that backward does not hide.

    Raises
    ------
    ValueError
        If a layer is used several times.
    """

    def __init__(self, projector: Projector, messages: MessageCosts) -> None:
        work = projector.work
        backend = dry_backend(projector.backend, MIN_COUNTED_BYTES)
        self.graph = Graph(shapes_of(work.input_shape), backend=backend, dtype=work.dtype)
        outputs = nodes(self.graph.add(work.create_net(), *self.graph.inputs))
        shared = next((n.name for n in self.graph.nodes if n.layer.source is not None), None)
        if shared is not None:
            raise ValueError(
                f"search: expected layers that are used once, got {shared}, which shares its "
                "parameters; use one strategy for all layers"
            )
        self.ranks = messages.work.axes[AXIS]
        shape = {AXIS: self.ranks}
        self.mesh: Any = DryMesh(shape, inner_position(shape))
        self.costs, self.messages, self.slots = projector.costs, messages, work.slots
        self.samples = messages.work.samples_per_rank
        self.exposed = 1.0
        self.itemsize = self.graph.dtype.itemsize
        self.nodes = [*self.graph.nodes]
        place = {node: index for index, node in enumerate(self.nodes)}
        self.units = [
            Unit(node.name, tuple(place[source] for source in node.inputs)) for node in self.nodes
        ]
        self.units += [Unit(f"output {node.name}", (place[node],)) for node in outputs]
        self._time = lru_cache(maxsize=None)(self._exchange_seconds)
        self._costs = lru_cache(maxsize=None)(self._costs_of)

    # -- options of a unit ------------------------------------------------------------------------

    def __call__(self, index: int, states: tuple[UnitState, ...]) -> Iterator[UnitOption]:
        """Yield the options of a unit: `pydtnn.tools.perfmodel.search.solver.Options`."""
        have: Any = states
        if index < len(self.graph.inputs):
            yield UnitOption("", (), (Spread.WHOLE, frozenset()), 0.0)
            return
        natives = tuple(native for native, _ in have)
        for alone, sums in self._costs(index, natives):
            seconds, memory = alone.seconds + self.exposed * sums, alone.memory
            after: list[Any] = []
            needs: Any = alone.inputs
            for source, state, need in zip(self.units[index].inputs, have, needs, strict=True):
                found, time, size = self._available(source, state, need)
                after.append(found)
                seconds, memory = seconds + time, memory + size
            output = alone.output, frozenset[State]()
            yield UnitOption(alone.name, tuple(after), output, seconds, memory)

    def _available(self, source: int, state: Any, need: State) -> tuple[Any, float, float]:
        """Return the state with a layout available, and the time and memory of the exchange."""
        native, more = state
        if need in more or (need == native and native is not Spread.PARTIAL):
            return state, 0.0, 0.0
        if self.nodes[source] in self.graph.inputs and native is Spread.WHOLE:
            return (native, more | {need}), 0.0, 0.0  # a rank reads its part, and needs no dx
        size = self._bytes(self.nodes[source].shape)
        memory = size / self.ranks if isinstance(need, Cut) else size
        return (native, more | {need}), self._time(native, need, size), memory

    def _bytes(self, shape: Shape) -> float:
        """Return the bytes of a whole array of all samples."""
        return float(self.samples * prod(shape) * self.itemsize)

    def _costs_of(self, index: int, natives: tuple[State, ...]) -> list[tuple[UnitOption, float]]:
        """Return the options with the layouts that they need, and the times of their sums."""
        if index >= len(self.nodes):  # an output, which is whole
            return [(UnitOption("", (Spread.WHOLE,), Spread.WHOLE, 0.0), 0.0)]
        found, node = list[tuple[UnitOption, float]](), self.nodes[index]
        kind = kind_of(node.layer)
        layouts: list[Layout] = [{} if s is Spread.WHOLE else {AXIS: s} for s in natives]
        own = STRATEGIES.get(kind, ()) if kind else ()
        for name in ("", *(strategy for strategy in SEARCHED if strategy in own)):
            draft = Draft.of(node, self.mesh)
            try:
                if name:
                    apply_strategy(name, draft, AXIS, layouts)
                else:
                    follow(draft, AXIS, layouts)
                found.append(self._cost(name, draft, node))
            except (PlanError, ValueError):  # too few rows, filters or channels
                continue
        return found

    def _cost(self, name: str, draft: Draft, node: Node) -> tuple[UnitOption, float]:
        """Return the time and memory of a layer that is cut, and the time of its sums."""
        needs = tuple(layout.get(AXIS, Spread.WHOLE) for layout in draft.inputs)
        output = draft.output.get(AXIS, Spread.WHOLE)
        place = self.mesh.position
        shapes = tuple(
            part_shape(source.shape, layout, place)
            for source, layout in zip(node.inputs, draft.inputs, strict=True)
        )
        seconds, backend = 0.0, self.graph.backend
        for halo in draft.halos:
            if halo.changes:
                halo.mesh = self.mesh
                halo.bind(backend, self.graph.dtype, f"{node.name}/halo", shapes)
                more = self.samples * (prod(halo.output_shape) - prod(shapes[0]))
                sides = 2 if self.ranks > 2 else 1  # of inner ranks; this one is the first
                seconds += 2 * self._messages(float(sides * more * self.itemsize), sides)
                shapes = (halo.output_shape,)
        layer, samples = draft.layer, self.samples
        if isinstance(layer, Communicating):
            layer.mesh = self.mesh
        cut = next((s for s in (*needs, output) if isinstance(s, Cut) and s.dim == SAMPLES), None)
        if cut is not None:
            samples = -(-samples // self.ranks)
        layer.bind(backend, self.graph.dtype, node.name, shapes)
        labels = (Label(way, node.name) for way in ("forward", "backward"))
        seconds += sum(self.costs.seconds(label, layer, samples) for label in labels)
        parameters = sum(p.size for p in layer.parameters) * layer.parameter_dtype.itemsize
        seconds += self._statistics(layer)
        sums = self._gradients(draft, float(parameters))
        stored = 0.0 if isinstance(layer, IN_PLACE) else samples * prod(layer.output_shape)
        memory = stored * self.itemsize + (2 + self.slots) * parameters
        return UnitOption(name, needs, output, seconds, memory), sums

    # -- messages ---------------------------------------------------------------------------------

    def _gradients(self, draft: Draft, parameters: float) -> float:
        """Return the time of the sums of a layer's gradients, as a part of a long message."""
        axes = [*draft.summed, *(["data"] if self.messages.work.data > 1 else [])]
        times = (
            duration(self.messages.allreduce(axis, LONG_MESSAGE_BYTES))
            for axis in dict.fromkeys(axes)
        )
        return parameters / LONG_MESSAGE_BYTES * sum(times)

    def _statistics(self, layer: Layer) -> float:
        """Return the time of sums of statistics, forward and backward."""
        if not isinstance(layer, BatchNorm) or AXIS not in layer.sum_axes:
            return 0.0
        sums = 8 * (1 + 2 * layer.input_shapes[0][-1])
        return 2 * duration(self.messages.allreduce(AXIS, sums))

    def _messages(self, nbytes: float, count: int) -> float:
        """Return the time of messages from each rank to `count` others, `nbytes` in total."""
        each = Affine(nbytes / count, 0.0)
        kind = "messages" if count >= self.ranks - 1 else "neighbours"
        start = Start(0, "", kind, AXIS, Affine(nbytes, 0.0), each, count)
        return duration(self.messages.layer(start, 0))

    def _exchange_seconds(self, before: State, after: State, nbytes: float) -> float:
        """Return the time of an exchange in both directions: `pydtnn.model.partition.exchange`."""
        to: State = Spread.WHOLE if before is Spread.PARTIAL else before
        return self._one_way(before, after, nbytes) + self._one_way(after, to, nbytes)

    def _one_way(self, before: State, after: State, nbytes: float) -> float:
        others, cuts = self.ranks - 1, [isinstance(state, Cut) for state in (before, after)]
        if cuts[0] or (before is Spread.PARTIAL and cuts[1]):
            part = nbytes / self.ranks ** (1 + all(cuts))
            return self._messages(others * part, others)
        return duration(self.messages.allreduce(AXIS, nbytes)) if before is Spread.PARTIAL else 0.0
