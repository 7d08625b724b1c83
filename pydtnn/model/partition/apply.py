"""The pass over the graph that replaces layers by this rank's parts and inserts exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from pydtnn.layers.base import Layer
from pydtnn.layers.collectives import PIPELINE
from pydtnn.layers.communicating import Communicating, MeshLike
from pydtnn.layers.experts import Experts
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Cut, ParameterPart
from pydtnn.model.graph import Graph
from pydtnn.model.partition.draft import Draft, Layout, PlanError, also_cut
from pydtnn.model.partition.exchange import SAMPLES, Exchange, Spread, State, describe_state
from pydtnn.model.partition.plan import NAMES, Plan, find_plan
from pydtnn.model.partition.rules import STRATEGIES, apply_strategy, follow, kind_of, with_halo
from pydtnn.model.partition.stages import PipelineCut, cut_stages
from pydtnn.model.pipeline.schedules import Owners
from pydtnn.utils.names import matches


def partition(
    graph: Graph,
    outputs: tuple[Node, ...],
    plan: Plan | Mapping[str, Any] | str | None,
    mesh: MeshLike | None,
    *,
    input_gradient: bool = False,
    owners: Callable[[int], Owners],
) -> tuple[tuple[Node, ...], PipelineCut | None]:
    """Partition a graph that contains all nodes and is neither fused nor finished.

    Parameters
    ----------
    graph : Graph
        Its nodes are replaced.
    outputs : sequence of Node
        Outputs of the model.
    plan : Plan, mapping or str, optional
        See `pydtnn.model.partition.plan.find_plan`.
    mesh : MeshLike, optional
        Without one, or without axes besides "data", the graph is not changed. Along the axis
        "pipeline" the network is cut into stages first, each of which is then partitioned.
    input_gradient : bool
        Whether the gradient of the inputs is needed; otherwise an input of which only a part is
        read on this rank becomes this part, unless there are stages.
    owners : callable
        Returns the ranks of the stages for a number of ranks along "pipeline".

    Returns
    -------
    outputs : tuple of Node
        The outputs, whole on every rank; of this rank's stages, one after the other.
    cut : PipelineCut or None
        The messages of this rank's stages if there are several ranks along "pipeline".

    Raises
    ------
    ValueError
        If the plan does not fit the network or the mesh.
    """
    if mesh is None:
        if plan is not None:
            raise ValueError("Model: a plan requires the ranks; use mesh=Mesh(comm, ...)")
        return outputs, None
    axes = [axis for axis in mesh.shape if axis not in ("data", PIPELINE)]
    if not axes and plan is None and PIPELINE not in mesh.shape:
        return outputs, None
    plan = find_plan(plan, axes, pipeline=PIPELINE in mesh.shape)
    plan.check([node.name for node in graph.nodes if node not in graph.inputs], axes)
    check_strategies(plan, [node.layer for node in graph.nodes if node not in graph.inputs])
    cut, final = None, len(outputs)
    if mesh.shape.get(PIPELINE, 1) > 1:
        ranks, rank = mesh.shape[PIPELINE], mesh.position[PIPELINE]
        cut = cut_stages(graph, outputs, owners(ranks), rank, plan.stages)
        outputs = tuple(node for own in cut.outputs for node in own)
        final = 0 if cut.stages[-1].sends else final
    used = [axis for axis in axes if mesh.shape[axis] > 1]
    if cut is not None and not used:
        return outputs, cut
    work = _PartitionPass(graph, plan, mesh, used)
    for node in graph.nodes[len(graph.inputs) :]:
        work.add(node)
    results = tuple(work.whole(node) for node in outputs)
    for node in results[len(results) - final :]:
        work.may_remain_cut(node)
    if cut is None:  # a stage may contain no layer that can be cut
        work.check_use()
    if cut is None and not input_gradient:
        for node in graph.inputs:
            work.cut_input(node, results)
    for index, node in enumerate(work.nodes):
        node.index = index
    graph.nodes = work.nodes
    return results, cut


def check_strategies(plan: Plan, layers: Sequence[Layer]) -> None:
    """Raise PlanError if no layer that a pattern matches has one of its strategies."""
    for pattern, own in plan.rules.items():
        kinds = {kind_of(x): type(x).__name__ for x in layers if matches(pattern, str(x.name))}
        known = {strategy for kind in kinds if kind for strategy in STRATEGIES.get(kind, ())}
        for strategy in own:
            if strategy == "expert" and Experts not in kinds:
                raise PlanError(
                    "Plan: expert divides the experts of a network, and "
                    f"{'this one' if pattern == '*' else pattern} has none; use data"
                )
            if pattern != "*" and strategy not in known:
                have = ", ".join(name for name in NAMES if name in known) or "none"
                raise PlanError(
                    f"Plan: {pattern}: {' and '.join(sorted({*kinds.values()}))} cannot be "
                    f"partitioned by {strategy}; strategies are {have}"
                )


class Use(NamedTuple):
    """The first use of a layer: its name, the layouts of its inputs, and how it was partitioned."""

    name: str
    layouts: Sequence[Layout]
    draft: Draft


class _PartitionPass:
    def __init__(self, graph: Graph, plan: Plan, mesh: MeshLike, axes: Sequence[str]) -> None:
        self.graph, self.plan, self.mesh, self.axes = graph, plan, mesh, axes
        self.nodes: list[Node] = []
        self.new: dict[Node, Node] = {}
        self.layouts: dict[Node, Layout] = {}
        self.layers: dict[int, Layer] = {}  # this rank's layer for each layer of the network
        self.exchanged: dict[tuple[Node, tuple[tuple[str, State], ...]], Node] = {}
        self.refused: dict[str, PlanError] = {}
        self.uses: dict[int, Use] = {}  # the first use of each layer of the network
        for node in graph.inputs:
            self._keep(node, node, {})

    def _keep(self, old: Node, new: Node, layout: Layout) -> None:
        new.consumers = []
        new.index = len(self.nodes)
        self.nodes.append(new)
        self.new[old], self.layouts[new] = new, layout
        new.layout = layout

    def add(self, node: Node) -> None:
        """Add this rank's part of a node, after the exchanges that it requires."""
        sources = [self.new[source] for source in node.inputs]
        draft = self._draft_use(node, [self.layouts[source] for source in sources])
        inputs = [
            self._in_layout(source, layout)
            for source, layout in zip(sources, draft.inputs, strict=True)
        ]
        conv = with_halo(draft)
        draft.layer = conv or draft.layer
        for halo in draft.halos if conv is None else ():
            if halo.changes:
                inputs = [self._append(halo, f"{node.name}/halo", inputs, self.layouts[inputs[0]])]
        layer = draft.layer
        layer.source = self.layers[id(layer.source)] if layer.source is not None else None
        self.layers[id(draft.whole)] = layer
        new = self._append(layer, node.name, inputs, draft.output)
        self.new[node] = new
        self._make_parts(draft)

    def _draft_use(self, node: Node, layouts: Sequence[Layout]) -> Draft:
        """Partition a layer; all uses of its parameters like the first one."""
        source = node.layer.source
        if source is None or not node.layer.parameters:
            draft = self._draft(node, node.name, layouts)
            self.uses[id(node.layer)] = Use(node.name, layouts, draft)
            return draft
        name, before, first = self.uses[id(source)]
        shapes = node.layer.input_shapes
        layouts = [first.fit(*pair) for pair in zip(before, shapes, strict=True)]
        draft = self._draft(node, name, layouts)
        for axis in self.axes:
            if draft.parameter_cuts(axis) != first.parameter_cuts(axis):
                raise draft.refuse(axis, f"it cannot be cut like {name}, whose parameters it has")
        return draft

    def _draft(self, node: Node, name: str, layouts: Sequence[Layout]) -> Draft:
        """Partition a layer along all axes, where a plan that is not explicit allows exceptions."""
        left: set[str] = set()
        while True:
            draft = Draft.of(node, self.mesh)
            strategies = self.plan.strategies(name)
            kind = kind_of(node.layer)
            for axis in self.axes:
                strategy = strategies.get(axis)
                own = kind is not None and strategy in STRATEGIES.get(kind, ())
                if not own or strategy is None or axis in left:
                    follow(draft, axis, layouts)
                    continue
                try:
                    apply_strategy(strategy, draft, axis, layouts)
                    self._check_axes(draft)
                except PlanError as error:
                    if self.plan.explicit or strategy == "expert":
                        raise
                    self.refused.setdefault(axis, error)
                    left.add(axis)
                    break
            else:
                return draft

    def _check_axes(self, draft: Draft) -> None:
        for layout in (*draft.inputs, draft.output):
            cuts = [state for state in layout.values() if isinstance(state, Cut)]
            for first, second in combinations(cuts, 2):
                if first.dim == second.dim:
                    raise draft.refuse(
                        second.axis, f"the same axis of its arrays is cut along {first.axis}"
                    )

    def _append(self, layer: Layer, name: str, inputs: Sequence[Node], layout: Layout) -> Node:
        shapes = tuple(source.shape for source in inputs)
        if isinstance(layer, Communicating):
            layer.mesh = self.mesh
        for axis, state in layout.items():
            if isinstance(state, Cut) and state.dim == SAMPLES:
                layer.batch_part = self.mesh.position[axis], self.mesh.shape[axis]
        try:
            layer.bind(self.graph.backend, self.graph.dtype, name, shapes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        node = Node(len(self.nodes), layer, tuple(inputs), layer.output_shape)
        for source in inputs:
            source.consumers.append(node)
        self.nodes.append(node)
        self.layouts[node] = node.layout = layout
        return node

    def _in_layout(self, source: Node, layout: Layout) -> Node:
        """Return a node with the array of another one in a layout; the same one if it has it."""
        # gathers first: two axes of the mesh never cut the same axis of an array
        left = sorted(self.axes, key=lambda axis: isinstance(layout.get(axis), Cut))
        while left:
            have = self.layouts[source]
            free = (a for a in left if not _blocked(have, layout.get(a, Spread.WHOLE)))
            axis = next(free, None)
            if axis is None:  # axes exchange their cuts: one of them gathers in between
                axis = next(a for a in left if isinstance(have.get(a), Cut))
                source = self._exchange(source, axis, Spread.WHOLE)
                continue
            source = self._exchange(source, axis, layout.get(axis, Spread.WHOLE))
            left.remove(axis)
        return source

    def _exchange(self, source: Node, axis: str, after: State) -> Node:
        """Return a node with the array of another one in another layout along one axis."""
        before = self.layouts[source].get(axis, Spread.WHOLE)
        if before == after and before is not Spread.PARTIAL:
            return source
        key = (source, ((axis, after),))
        if key not in self.exchanged:
            if _other_blocks(before, after):
                return self._exchange(self._exchange(source, axis, Spread.WHOLE), axis, after)
            place, axes = self.mesh.position, len(source.shape)
            exchange = Exchange(axis, before, after, position=place, ranks=self.mesh.shape[axis])
            name = f"{source.name}/{describe_state(before, axes)}-{describe_state(after, axes)}"
            rest = {**self.layouts[source], axis: after}
            self.exchanged[key] = self._append(exchange, name, [source], rest)
        return self.exchanged[key]

    def whole(self, node: Node) -> Node:
        """Return a node with the whole array of a node of the network."""
        return self._in_layout(self.new[node], {})

    def may_remain_cut(self, output: Node) -> None:
        """Let an output that is gathered along channels or positions remain cut for its loss."""
        layer, last = output.layer, len(output.shape) - 1
        if isinstance(layer, Exchange) and not output.consumers:
            cut = layer.before
            dims = (0, last) if last == 1 else (last,)
            layer.optional = isinstance(cut, Cut) and cut.dim in dims and cut.blocks == 1

    def cut_input(self, node: Node, outputs: Sequence[Node]) -> None:
        """Let an input be the part of which this rank's layers take it, if all take the same."""
        while len(node.consumers) == 1 and node not in outputs:
            exchange = node.consumers[0].layer
            if not isinstance(exchange, Exchange) or exchange.before is not Spread.WHOLE:
                return
            cut = exchange.after
            if not isinstance(cut, Cut) or cut.dim == SAMPLES:
                return
            index = list(node.part or [slice(None)] * len(node.shape))
            index[cut.dim] = cut.range(self.mesh.position)
            removed = node.consumers[0]
            node.part, node.shape = tuple(index), removed.shape
            node.consumers = removed.consumers
            for reader in node.consumers:
                reader.inputs = tuple(node if n is removed else n for n in reader.inputs)
            self.nodes.remove(removed)

    def _make_parts(self, draft: Draft) -> None:
        """Declare the parts of parameters and statistics, and the axes of their sums."""
        layer, position = draft.layer, self.mesh.position
        for own, whole in zip(layer.parameters, draft.whole.parameters, strict=True):
            if own.source is own:
                own.group = "+".join(dict.fromkeys([*own.group.split("+"), *draft.summed]))
                own.fan_in, own.fan_out = whole.fan_in, whole.fan_out
                cuts = draft.cuts.get(whole.name.rpartition(".")[2])
                if cuts:
                    own.become_part(ParameterPart(whole.shape, tuple(cuts)), position)
        if "channels" in draft.cuts:
            for statistic, before in zip(layer.statistics, draft.whole.statistics, strict=True):
                statistic.part = ParameterPart((before.channels,), tuple(draft.cuts["channels"]))

    def check_use(self) -> None:
        """Raise ValueError if no layer is cut along an axis."""
        cut = {
            axis
            for layout in self.layouts.values()
            for axis, state in layout.items()
            if state is not Spread.WHOLE
        }
        for node in self.nodes:  # custom layers have whole inputs and outputs
            parts = (p.part for p in node.layer.parameters if p.part is not None)
            cut |= {own.axis for part in parts for own in part.cuts}
        for axis in self.axes:
            if axis not in cut:
                if axis in self.refused:
                    raise self.refused[axis]
                raise PlanError(
                    f"Plan: no layer is cut along the axis {axis}={self.mesh.shape[axis]}; give a "
                    "plan with layers that can be"
                )


def _other_blocks(before: State, after: State) -> bool:
    """Return whether two states cut an axis in different numbers of blocks."""
    if not (isinstance(before, Cut) and isinstance(after, Cut)):
        return False
    return before.dim == after.dim and before.blocks != after.blocks


def _blocked(have: Layout, wanted: State) -> bool:
    """Return whether an array cannot be cut yet, as it is cut in the same way along an axis."""
    return isinstance(wanted, Cut) and also_cut(have, wanted)
