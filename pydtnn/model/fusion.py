"""The graph pass that fuses normalisation, addition and activation into convolutions.

Batch norm, the addition at the end of a residual block, and ReLU read and write whole arrays for a
few operations per element. This pass replaces

    batch norm [-> add] [-> ReLU]    by `NormAddReLU`, whose output is deferred: the next
                                     convolution computes it while packing its input
    convolution                      by `FusedConv2d`, which reads deferred arrays
    convolution -> batch norm        by one that also computes the norm's sums, and in
                                     inference uses filters into which the norm is folded
    convolution -> ReLU              by one that applies the ReLU, unless the next
                                     layer is a convolution: then the ReLU is deferred

    convolution -> ReLU -> max pool  by convolution -> max pool -> ReLU, with equal values: the
                                     output of the convolution is not kept for backward, and the
                                     ReLU has fewer elements

On backends whose convolutions apply masks, `ReLU6` is a ReLU with a limit, which the convolution
before it does not apply. A `LeakyReLU` changes places with a max pool, too. Results are equal
within rounding. Parameters, statistics and their names remain those of the original layers.
"""

from __future__ import annotations

from math import inf, prod
from typing import NamedTuple

import numpy as np

from pydtnn.layers.activation import LeakyReLU, ReLU, ReLU6
from pydtnn.layers.base import Finisher, computes_like, toggled
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.merge import Add, Concat
from pydtnn.layers.norm import BatchNorm
from pydtnn.layers.pool import MaxPool2d
from pydtnn.layers.volume import Conv3d, MaxPool3d
from pydtnn.model.graph import Graph, Node

DROPS = FusedConv2d, NormAddReLU, Concat
"""Layers that restore the values of deferred inputs in backward."""


class Pattern(NamedTuple):
    """Nodes that one `NormAddReLU` can replace, in order, and its inputs."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    norms: tuple[BatchNorm | None, ...]
    relu: bool
    limit: float = inf  # of the ReLU


def fuse(graph: Graph, outputs: tuple[Node, ...]) -> tuple[Node, ...]:
    """Replace patterns in a graph that contains all nodes but is not finished.

    Parameters
    ----------
    graph : Graph
    outputs : tuple of Node
        Outputs of the model.

    Returns
    -------
    tuple of Node
        The outputs after fusion.
    """
    for node in graph.nodes:
        # subclasses that override the computation are not fused
        if isinstance(node.layer, Conv2d) and computes_like(node.layer, Conv2d):
            node.layer = FusedConv2d(node.layer)
    for node in graph.nodes:
        _pool_first(node, outputs)
    pass_ = _FusionPass(outputs)
    for node in reversed(graph.nodes):  # the end of a pattern is visited before its inputs
        if node not in pass_.absorbed:
            pass_.visit(node)
    graph.nodes = [node for node in graph.nodes if node not in pass_.absorbed]
    for index, node in enumerate(graph.nodes):
        node.index = index
        node.inputs = tuple(pass_.replaced.get(n, n) for n in node.inputs)
        node.consumers = []
    for node in graph.nodes:
        for source in node.inputs:
            source.consumers.append(node)
    # Once for each node: it may be the input of many others.
    normed = {n for n in graph.nodes if any(isinstance(r.layer, NormAddReLU) for r in n.consumers)}
    sums = {n for n in normed if type(n.layer) is Concat and _sums(n)}
    outputs = tuple(pass_.replaced.get(n, n) for n in pass_.outputs)
    for node in graph.nodes:
        if isinstance(node.layer, NormAddReLU):
            _connect(node, node.layer, outputs)
            _drop_source(node, node.layer, outputs)
        elif type(node.layer) is Concat:
            _connect_concat(node, node.layer, outputs, normed, sums)
    return outputs


def _drop_source(node: Node, layer: NormAddReLU, outputs: tuple[Node, ...]) -> None:
    """Drop the stored values of the plain input of an addition, if those of the sum are stored.

    Only convolutions read them besides. In backward, they compute them of their terms while they
    read; the mask of the sum is that of its stored values.
    """
    plain = [n for n, norm in zip(node.inputs, layer.norms, strict=True) if norm is None]
    own = plain[0].layer if plain else None
    if len(plain) != 1 or len(node.inputs) != 2 or not isinstance(own, NormAddReLU):
        return
    readers = [reader for reader in plain[0].consumers if reader is not node]
    apart = plain[0] not in outputs and all(type(n.layer) is FusedConv2d for n in readers)
    stored = layer.keeps and type(layer.reader) is FusedConv2d and own.reader is not None
    exact = layer.dtype.itemsize > 2 and layer.backend.gates and not layer.backend.keeps_values
    layer.stays = own.drops = apart and stored and exact and not own.stays
    for changed in (layer, own):
        if changed.reader is not None:
            changed.reader.evaluation = changed.evaluation


def _connect_concat(
    node: Node, layer: Concat, outputs: tuple[Node, ...], normed: set[Node], sums: set[Node]
) -> None:
    """Set which inputs of a `Concat` get views of its gradient, and whether it is joined again.

    Norms read the nodes `normed`; those of them in `sums` are described by `_sums`.
    """
    first = node.inputs[0].layer
    extends = isinstance(first, Concat) and first.recomputed and first.axis == layer.axis
    if node not in outputs:
        layer.recomputed = _is_joined_again(node) or _grows(node, extends, normed)
    layer.extends = extends and layer.recomputed
    if layer.backend.xp is np and layer.dtype.itemsize > 2:
        node.pitched = layer.pitched = tuple(
            i for i, n in enumerate(node.inputs) if n in sums and n not in outputs
        )


def _sums(node: Node) -> bool:
    """Return whether the gradient of a `Concat` that a norm reads is a sum."""
    others = any(isinstance(reader.layer, Finisher) for reader in node.consumers)
    return len(node.consumers) > 1 and not others


def _grows(node: Node, extends: bool, normed: set[Node]) -> bool:
    """Return whether norms need not keep the output of a `Concat` in a block of a DenseNet.

    All but a small part of it is kept anyway: by norms, or as the parts of a `Concat` before.
    """
    first, *others = node.inputs
    kept = extends or first in normed
    readers = {type(reader.layer) for reader in node.consumers}
    small = 2 * sum(prod(source.shape) for source in others) < prod(node.shape)
    known = NormAddReLU in readers <= {NormAddReLU, Concat}
    later = [n.layer for reader in node.consumers for n in reader.consumers]
    known = known and all(type(own) in DROPS or "deferred" not in own.supports for own in later)
    return kept and small and known and not node.layer.backend.keeps_values


def _is_joined_again(node: Node) -> bool:
    """Return whether convolutions need not keep the output of a `Concat`.

    Most of its inputs are deferred, so that what they are computed of is kept anyway, and no reader
    keeps the array.
    """
    deferred = sum(isinstance(source.layer, NormAddReLU) for source in node.inputs)
    readers = [reader.layer for reader in node.consumers]
    others = [layer for layer in readers if type(layer) is not FusedConv2d]
    kept = any("input" in layer.saves or "output" in layer.views for layer in others)
    few = 2 * deferred <= len(node.inputs)
    return not (few or kept or len(others) == len(readers) or node.layer.backend.keeps_values)


def _pool_first(node: Node, outputs: tuple[Node, ...]) -> None:
    """Exchange a max pool with the ReLU before it, if that follows a convolution."""
    if type(node.layer) not in (MaxPool2d, MaxPool3d):
        return
    (before,) = node.inputs
    pool, relu = node.layer, before.layer
    hidden = len(before.consumers) == 1 and before not in outputs
    known = type(relu) in (ReLU, ReLU6, LeakyReLU)
    if hidden and known and isinstance(before.inputs[0].layer, Conv2d | Conv3d):
        before.layer, before.shape, before.layout = pool, node.shape, node.layout
        node.layer, relu.input_shapes, relu.output_shape = relu, (node.shape,), node.shape


class _FusionPass:
    def __init__(self, outputs: tuple[Node, ...]) -> None:
        self.outputs = outputs
        self.absorbed: set[Node] = set()
        self.replaced: dict[Node, Node] = {}

    def hidden(self, node: Node) -> bool:
        """Return whether the node's output has exactly one reader."""
        return len(node.consumers) == 1 and node not in self.outputs

    def visit(self, node: Node) -> None:
        pattern = self.match(node)
        if pattern is None:
            return
        source = pattern.inputs[0]
        conv = _conv(source) if self.hidden(source) else None
        feeds_conv = any(map(_conv, node.consumers[:1]))
        if len(pattern.nodes) > 1 or feeds_conv or (conv and not pattern.relu):
            self.replace(node, pattern)
        elif conv and pattern.relu and pattern.limit == inf:
            conv.absorb_relu(node.name)
            self.absorbed.add(node)
            self.replaced[node] = source

    def match(self, node: Node) -> Pattern | None:
        """Find the pattern that ends with this node."""
        layer = node.layer
        if type(layer) is BatchNorm:
            return Pattern((node,), node.inputs, (layer,), False)
        if type(layer) is ReLU or (type(layer) is ReLU6 and layer.backend.gates):
            limit = 6 if type(layer) is ReLU6 else inf
            (source,) = node.inputs
            joins = type(source.layer) in (BatchNorm, Add) and self.hidden(source)
            inner = self.match(source) if joins else None
            if inner is None:
                return Pattern((node,), node.inputs, (None,), True, limit)
            return Pattern((*inner.nodes, node), inner.inputs, inner.norms, True, limit)
        if type(layer) is Add and len(node.inputs) == 2:
            parts = [self.match_norm(source) for source in node.inputs]
            return Pattern(
                (*(n for part in parts for n in part.nodes), node),
                tuple(n for part in parts for n in part.inputs),
                tuple(norm for part in parts for norm in part.norms),
                False,
            )
        return None

    def match_norm(self, node: Node) -> Pattern:
        """Find the batch norm that computes an input of an addition, or return the input itself."""
        if type(node.layer) is BatchNorm and self.hidden(node):
            return Pattern((node,), node.inputs, (node.layer,), False)
        return Pattern((), (node,), (None,), False)

    def replace(self, node: Node, pattern: Pattern) -> None:
        parts = [n.layer for n in pattern.nodes]
        layer = NormAddReLU(parts, pattern.norms, relu=pattern.relu, limit=pattern.limit)
        layer.sum_axes = next((norm.sum_axes for norm in pattern.norms if norm), ())
        layer.batch_part = parts[-1].batch_part
        layer.bind(
            parts[0].backend,
            parts[0].dtype,
            str(parts[0].name),
            tuple(n.shape for n in pattern.inputs),
        )
        node.layer = layer
        node.inputs = pattern.inputs
        self.absorbed.update(n for n in pattern.nodes if n is not node)


def _conv(node: Node) -> FusedConv2d | None:
    return node.layer if isinstance(node.layer, FusedConv2d) else None


def _connect(node: Node, layer: NormAddReLU, outputs: tuple[Node, ...]) -> None:
    """Set the fusion attributes of a new node and of the preceding convolutions."""
    layer.keeps = len(node.consumers) > 1 or node in outputs
    layer.reader = _conv(node.consumers[0]) if node.consumers else None
    if layer.reader is not None:
        layer.reader.evaluation = layer.evaluation
    makers = [
        _conv(n) if norm and len(n.consumers) == 1 and n not in outputs else None
        for n, norm in zip(node.inputs, layer.norms, strict=True)
    ]
    for conv, norm in zip(makers, layer.norms, strict=True):
        if conv and not conv.relu:
            conv.norm = norm
    layer.folded = tuple(conv if conv and conv.norm else None for conv in makers)
    new = _may_overwrite_gradient(node, layer)
    layer.new_results = toggled(layer.new_results, "gradient", new)


def _may_overwrite_gradient(node: Node, layer: NormAddReLU) -> bool:
    """Return whether a plain input may overwrite the gradient it receives.

    The same array is part of the other input's deferred gradient, which must be read before.
    """
    plain = [n for n, norm in zip(node.inputs, layer.norms, strict=True) if norm is None]
    normed = [n for n, norm in zip(node.inputs, layer.norms, strict=True) if norm is not None]
    if not plain or len(node.inputs) == 1:
        return True
    if not normed:
        return False
    touched = max([plain[0].index, *(n.index for n in plain[0].consumers if n is not node)])
    return touched < normed[0].index
