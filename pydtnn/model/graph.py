"""The static graph of a model: nodes in execution order, and the lifetime of their arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, overload

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.layers.base import Finisher, Layer, Shape
from pydtnn.layers.blocks import Block, Net
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.node import Node, Outputs
from pydtnn.layers.recomputed import Recomputing
from pydtnn.layers.reshape import Identity
from pydtnn.model.partition.exchange import Exchange
from pydtnn.model.parts import GraphPart, PartSizes, find_parts
from pydtnn.model.passes import BatchParts, GatheredOutputs, Hook, LatePasses, may_be_late


def shapes_of(input_shape: Shape | Sequence[Shape]) -> tuple[Shape, ...]:
    """Return the shapes of a model's inputs from one shape or several.

    Raises
    ------
    TypeError, ValueError
    """
    if isinstance(input_shape, int | np.integer):
        raise TypeError(
            f"Model: input_shape must be a tuple, got {input_shape}; use ({input_shape},)"
        )
    several = len(input_shape) > 0 and isinstance(input_shape[0], tuple | list)
    shapes: Any = input_shape if several else (input_shape,)
    if not all(isinstance(n, int | np.integer) and n > 0 for shape in shapes for n in shape):
        raise ValueError(f"Model: input_shape must be positive ints, got {input_shape!r}")
    return tuple(tuple(map(int, shape)) for shape in shapes)


class Graph:
    """Nodes added by layers and blocks for one backend and dtype.

    Parameters
    ----------
    input_shapes : sequence of tuple of int
        One per input of the model, without the batch axis.
    backend : Backend
    dtype : str or numpy.dtype
    """

    def __init__(self, input_shapes: Sequence[Shape], *, backend: Backend, dtype: str) -> None:
        self.backend = backend
        self.dtype = np.dtype(dtype)
        self.nodes: list[Node] = []
        self.outputs: tuple[Node, ...] = ()
        self.parts: tuple[GraphPart, ...] = ()
        self.hooks: list[Hook] = []  # of features, around the passes of nodes
        self.late: tuple[Hook, ...] = ()  # around these
        self._scope: list[str] = []
        self._blocks = 0
        self._unnamed: tuple[int, ...] = ()  # numbers of the open blocks without a component
        self._names: dict[str, tuple[int, ...]] = {}  # with these numbers
        self.inputs = tuple(
            self._append(Identity(), (), shape, f"input{i}") for i, shape in enumerate(input_shapes)
        )

    @overload
    def add(self, part: Layer, *inputs: Node, label: str = "") -> Node: ...

    @overload
    def add(self, part: Net, *inputs: Node, label: str = "") -> Outputs: ...

    def add(self, part: Net, *inputs: Node, label: str = "") -> Outputs:
        """Connect a layer or a block to `inputs`; return the node of its output, or several.

        Parameters
        ----------
        part : Layer or Block
        *inputs : Node
        label : str
            Place within the enclosing block: a number is appended to the class's name. The name of
            the part has precedence. A layer without either is named after its class. If the name of
            a layer without a name of its own exists, or exists in another block without a name and
            label, or the layer is added once more, "_1", "_2" and so on is appended.

        Raises
        ------
        TypeError
            If `part` is neither.
        ValueError
            If shapes do not match, a name is used twice, or a layer belongs to another model.

        Notes
        -----
        A layer that is added several times shares its parameters and running statistics between
        all uses, each of which is a node with a layer of its own (`Layer.source`).
        """
        if not isinstance(part, Layer | Block):
            use = "; use Sequential(*layers)" if isinstance(part, list | tuple) else ""
            raise TypeError(f"Model: expected a layer or a block, not a class, got {part!r}{use}")
        leaf = isinstance(part, Layer)
        if label.isdigit() or (not label and leaf):
            label = type(part).__name__.lower() + label
        self._scope.append(label if part.name is None or (leaf and not part.name) else part.name)
        unnamed = self._unnamed
        try:
            if isinstance(part, Block):
                self._blocks += 1
                if part.name is None and not label:
                    self._unnamed = (*unnamed, self._blocks)
                return part.wire(self, *inputs)
            name = ".".join(filter(None, self._scope))
            elsewhere = self._names.get(name, unnamed) != unnamed
            free = self._free(name) if elsewhere or not part.name else name
            return self._append(part, inputs, None, free)
        finally:
            self._scope.pop()
            self._unnamed = unnamed

    def _free(self, name: str) -> str:
        """Return `name`, or if it exists, the name with the lowest number that does not."""
        others = (f"{name}_{i}" for i in range(1, len(self._names) + 1))
        return next(free for free in (name, *others) if free not in self._names)

    def _append(
        self, layer: Layer, inputs: tuple[Node, ...], shape: Shape | None, name: str
    ) -> Node:
        if layer.bound:
            layer, name = self._another_use(layer, name), self._free(name)
        if name in self._names:
            raise ValueError(f"{name}: names of layers must be unique, got two; rename one")
        self._names[name] = self._unnamed
        shapes = tuple(n.shape for n in inputs) if shape is None else (shape,)
        try:
            layer.bind(self.backend, self.dtype, name, shapes)
        except ValueError as error:
            fed = f" (fed by {' and '.join(n.name for n in inputs)})" if len(inputs) > 1 else ""
            raise ValueError(f"{name}{fed}: {error}") from error
        node = Node(len(self.nodes), layer, inputs, layer.output_shape)
        for source in inputs:
            source.consumers.append(node)
        self.nodes.append(node)
        return node

    def _another_use(self, layer: Layer, name: str) -> Layer:
        """Return a layer that shares the parameters of `layer`."""
        if all(node.layer is not layer for node in self.nodes):
            raise ValueError(
                f"{name}: expected a new {type(layer).__name__}, got {layer.name} of another "
                "model; make a second one"
            )
        return layer.another_use()

    def adopt(self, nodes: Sequence[Node], replaced: Mapping[Node, Node]) -> None:
        """Append nodes of another graph, which read those of `replaced` instead of the key."""
        for node in nodes:
            node.index = len(self.nodes)
            node.inputs = tuple(replaced.get(source, source) for source in node.inputs)
            node.consumers = []
            for source in node.inputs:
                source.consumers.append(node)
            self.nodes.append(node)
            self._names[node.name] = ()

    def finish(
        self,
        outputs: Sequence[Node],
        *,
        input_gradient: bool = False,
        parts: Sequence[PartSizes] = (),
    ) -> None:
        """Set the outputs; determine needed gradients, in-place operations and releases of arrays.

        Parameters
        ----------
        outputs : sequence of Node
        input_gradient : bool
            Whether the gradients of all inputs are needed; those of received values are.
        parts : sequence of PartSizes, optional
            Of the parts of the graph, whose inputs and outputs follow each other; by default one.

        Raises
        ------
        ValueError
            If a layer's output is neither read nor an output of the model.
        """
        self.outputs = tuple(outputs)
        sizes = parts or (PartSizes(len(self.inputs), 0, len(outputs)),)
        self.parts, self._differentiated = find_parts(
            self.inputs, self.nodes[len(self.inputs) :], self.outputs, sizes, input_gradient
        )
        self.nodes = [*self.inputs, *(node for part in self.parts for node in part.layers)]
        for index, node in enumerate(self.nodes):
            node.index = index
        for node in self.nodes:
            if not node.consumers and node not in self.outputs:
                raise ValueError(f"{node.name}: the output of this layer is not used; remove it")
        if any(node.layer.batch_part is not None for node in self.nodes):
            self.hooks.append(BatchParts())
        if any(map(may_be_late, self.nodes)):
            self.hooks.append(GatheredOutputs())
            self.late = (LatePasses(),)
        self._find_releases()
        self.find_overwrites(())
        self._find_shared()
        self.find_trained()

    def part(self, number: int | None) -> GraphPart:
        """Return one of the parts; None: all nodes."""
        if number is not None or len(self.parts) == 1:
            return self.parts[number or 0]
        return GraphPart(self.inputs, tuple(self.nodes[len(self.inputs) :]), self.outputs)

    def find_trained(self) -> None:
        """Determine which gradients are needed, at the start and after `Parameter.frozen` changed.

        A node is trained, and runs backward, if it or any preceding node has trainable parameters.
        """
        trained = {n.index for n in self._differentiated}
        for node in self.nodes:
            node.layer.needs_dx = any(i.index in trained for i in node.inputs)
            if node.layer.needs_dx or node.layer.trainable:
                trained.add(node.index)
        self.trained = frozenset(trained)
        self._find_finishers()
        self._find_recomputed()
        for node in self.nodes:  # a norm is folded into the filters before if both are constant
            layer = node.layer
            if isinstance(layer, NormAddReLU):
                for source, norm, conv in zip(node.inputs, layer.norms, layer.folded, strict=True):
                    if norm is not None and conv is not None:
                        conv.constant = norm.running.frozen and source.index not in self.trained

    def _find_shared(self) -> None:
        # Backward runs in reverse: the last layer with a parameter writes its gradient, and the
        # others add to it.
        seen: set[int] = set()
        for node in reversed(self.nodes):
            for p in node.layer.parameters:
                p.added = id(p.source) in seen
                seen.add(id(p.source))

    def _find_releases(self) -> None:
        for node in self.nodes:
            node.releases = tuple(
                {i.index for i in node.inputs if i.consumers[-1] is node and i not in self.outputs}
            )

    def find_overwrites(self, checkpoints: Collection[int]) -> None:
        """Determine which layers run in place, at the start and after checkpoints have changed.

        Parameters
        ----------
        checkpoints : collection of int
            Indices of nodes whose outputs recomputation requires.
        """
        # Forward may overwrite its input if the array is new, is read by no other layer and is not
        # saved by the layer that computed it.
        for node in self.nodes[len(self.inputs) :]:
            source = node.inputs[0]
            node.layer.overwrites_input = (
                "input" in node.layer.may_overwrite
                and "output" in source.layer.new_results
                and "output" not in source.layer.saves
                and len(source.consumers) == 1
                and source not in self.outputs
                and source.index not in checkpoints
            )
        # Backward may overwrite its dy if the array belongs only to this node: the sum of several
        # gradients does, as does a new array of its only consumer; an array that the consumer
        # passed on does if it belonged only to the consumer and was passed to no other node.
        owners: set[Node] = set()
        for node in reversed(self.nodes):
            if node not in self.outputs and (
                len(node.consumers) > 1 or self._gives_up_gradient(node.consumers[0], owners)
            ):
                owners.add(node)
            node.layer.overwrites_dy = "dy" in node.layer.may_overwrite and node in owners

    def _find_finishers(self) -> None:
        # Backward runs in reverse, so the first reader of an output is the last to contribute.
        for node in self.nodes[len(self.inputs) :]:
            layer = node.layer
            if isinstance(layer, Finisher):
                first = node.inputs[0].consumers[0] is node
                takes = "deferred" in layer.supports and layer.dtype == self.dtype
                layer.finishes = first and layer.needs_dx and takes

    def _find_recomputed(self) -> None:
        # The input of a layer that runs backward may be kept anyway; then its output need not be.
        for node in reversed(self.nodes):  # an exchange takes such outputs if its own is one
            if isinstance(node.layer, Recomputing):
                node.layer.recomputed = (
                    "recomputing" in node.layer.supports
                    and node.index in self.trained
                    and "output" not in node.layer.saves
                    and node not in self.outputs
                    and len(node.consumers) == 1  # it is computed again once
                    and all(_takes_output(reader.layer, node.layer) for reader in node.consumers)
                    and not self.backend.keeps_values
                )

    @staticmethod
    def _gives_up_gradient(consumer: Node, owners: set[Node]) -> bool:
        passes = "gradient" in consumer.layer.views and len(consumer.inputs) == 1
        return "gradient" in consumer.layer.new_results or (passes and consumer in owners)


def layers_ahead(inputs: Sequence[Node], nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return for each input the first layer that looks ahead in what depends on it, if any.

    Outputs of the network then depend on later positions of the input (`Layer.looks_ahead`).
    """
    found = []
    for source in inputs:
        dependent, ahead = {source}, ""
        for node in nodes:
            if not dependent.isdisjoint(node.inputs):
                dependent.add(node)
                looks = (node.inputs[i] for i in node.layer.looks_ahead)
                ahead = ahead or ("" if dependent.isdisjoint(looks) else node.name)
        found.append(ahead)
    return tuple(found)


def _takes_output(layer: Layer, of: Layer) -> bool:
    """Return whether a layer takes the output of another one as `Recomputed`."""
    if isinstance(layer, Exchange):
        return layer.recomputed and "recomputed" in layer.supports
    kept = "regathered" in layer.supports or not isinstance(of, Exchange)
    return kept and "recomputed" in layer.supports
