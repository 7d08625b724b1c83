"""A model as a table: shapes, parameters, operations, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydtnn.layers.base import Layer
from pydtnn.layers.collectives import PIPELINE
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Cut
from pydtnn.model.description import Description
from pydtnn.model.memory import Memory, forecast_memory
from pydtnn.model.partition.exchange import Exchange, Spread, describe_state
from pydtnn.model.recompute import cut
from pydtnn.model.stage import ModelLike
from pydtnn.utils.split import even_cut
from pydtnn.utils.units import align, quantity
from pydtnn.utils.validate import check_int


def layer_costs(model: ModelLike, samples: int) -> dict[str, dict[str, Any]]:
    """Return type, parameters and nominal work of each layer of this rank.

    Parameters
    ----------
    model : Model
    samples : int
        Samples of this rank in a step.

    Returns
    -------
    dict
        By the layer's name: "type", "parameters" (numbers), "forward_flops", "backward_flops" (in
        flop), "forward_bytes" and "backward_bytes" (in B), see `pydtnn.layers.base.Layer.cost`.
    """
    found: dict[str, dict[str, Any]] = {}
    for node in model.graph.nodes[len(model.graph.inputs) :]:
        layer = node.layer
        cost = layer.cost(local_samples(layer, samples))
        found[node.name] = {
            "type": type(layer).__name__,
            "parameters": sum(p.size for p in layer.parameters if p.source is p),
            "forward_flops": int(cost.flops_forward),
            "backward_flops": int(cost.flops_backward),
            "forward_bytes": int(cost.bytes_forward),
            "backward_bytes": int(cost.bytes_backward),
        }
    return found


def local_samples(layer: Layer, samples: int) -> int:
    """Return the samples that a layer computes on this rank, of those of its group's inputs."""
    if layer.batch_part is None:
        return samples
    place, ranks = layer.batch_part
    return even_cut(samples, ranks, place + 1) - even_cut(samples, ranks, place)


HEADINGS = ("layer", "type", "output", "parameters", "flop", "kept")
LEFT_ALIGNED = 3
"""Number of left-aligned columns; the others contain numbers."""


class Summary(str):
    """A table that is shown as it is at a prompt and in a notebook."""

    def __repr__(self) -> str:
        return str(self)


def summarize(model: ModelLike, batch: int = 1, *, slots: int = 0) -> str:
    """Describe a model in plain text.

    Parameters
    ----------
    model : Model
    batch : int
        Samples per rank and step, for the memory.
    slots : int
        Slots of the optimizer, for the memory: 1 for SGD with momentum, 2 for Adam.

    Returns
    -------
    str
        A line per layer: its dotted name, class, output shape of one sample, parameters,
        floating-point operations of forward for one sample, and the memory saved for its backward
        at this batch size, each array counted once. Parameters are counted at their first use, and
        fused layers share a line. Totals follow. If the network is cut over a mesh, these are the
        numbers of this rank, and further columns contain the layout of each output and the messages
        that the rank sends in a step of this batch, besides those of gradients. If values are
        recomputed, a column contains the part to which a layer belongs, and "output kept" if the
        output is a checkpoint; what enters a part is counted at its first layer.
    """
    check_int("summary", "batch", batch, at_least=1)
    check_int("summary", "slots", slots, at_least=0)
    cuts = model.find_cuts(batch, slots=slots)
    memory = forecast_memory(model, batch, slots=slots, cuts=cuts)
    again = _Again(model, cuts)
    parts = _Parts(model, memory)
    nodes = model.graph.nodes[len(model.graph.inputs) :]
    costs = [node.layer.cost(1) for node in nodes]
    rows = [
        (
            node.name,
            " + ".join(kinds(node.layer)),
            " x ".join(map(str, node.shape)),
            f"{sum(p.size for p in node.layer.parameters if p.source is p):,}",
            quantity(work.flops_forward, 1000),
            quantity(memory.kept[node.index], 1024, "B"),
            *again.cells(node),
            *parts.cells(node),
        )
        for node, work in zip(nodes, costs, strict=True)
    ]
    forward, backward = (sum(values) for values in list(zip(*costs, strict=True))[:2])
    count = sum(p.size for p in model.parameters.values())
    frozen = sum(p.size for p in model.parameters.values() if p.frozen)
    totals = [
        (
            "parameters",
            f"{count:,} in {len(model.parameters)} arrays"
            + f", of which {count - frozen:,} trained and {frozen:,} frozen" * bool(frozen),
        ),
        (
            "one sample",
            f"{quantity(forward, 1000)}flop forward, {quantity(backward, 1000)}flop backward",
        ),
        (
            f"batch of {batch}",
            f"{quantity(sum(memory.kept), 1024, 'B')} kept for backward, "
            f"{quantity(memory.peak, 1024, 'B')} at the peak of a step",
        ),
        (
            "of which",
            f"{quantity(memory.parameters, 1024, 'B')} parameters, "
            + f"{quantity(memory.copies, 1024, 'B')} 16-bit copies, " * bool(memory.copies)
            + f"{quantity(memory.gradients, 1024, 'B')} gradients, "
            f"{quantity(memory.slots, 1024, 'B')} the optimizer's slots",
        ),
        (
            "process" if model.backend.name != "cuda" else "GPU",
            f"{quantity(memory.resident, 1024, 'B')} more than before, "
            f"about {quantity(memory.scratch, 1024, 'B')} of it scratch memory of kernels",
        ),
    ]
    if cuts:
        without = forecast_memory(model, batch, slots=slots, cuts=())
        totals.append(
            (
                "recomputed",
                f"{again.share:.0%} of forward; without it, "
                f"{quantity(sum(without.kept), 1024, 'B')} are kept and "
                f"{quantity(without.peak, 1024, 'B')} are the peak",
            )
        )
    if model.pipeline is not None:
        totals.append(("pipeline", model.pipeline.describe()))
    if memory.pool:  # arrays of small networks are not allocated from it
        pool = quantity(memory.pool, 1024, "B")
        totals.append(("memory pool", f"{pool} at the peak of a step"))
    if parts.headings:
        totals.insert(
            2,
            (
                f"batch of {batch}",
                f"{parts.messages:,} messages of {quantity(parts.nbytes, 1024, 'B')} in a step to "
                "ranks with other parts of the network",
            ),
        )
    table = align([(*HEADINGS, *again.headings, *parts.headings), *rows], LEFT_ALIGNED)
    rule = "-" * max(map(len, table))
    return Summary("\n".join([table[0], rule, *table[1:], rule, *align(totals, 2)]))


class _Again:
    """The column of recomputed layers, if there are any."""

    def __init__(self, model: ModelLike, cuts: Sequence[int]) -> None:
        self.segments = cut(model.graph.nodes, model.graph.trained, cuts)
        self.headings = ("recomputed",) if cuts else ()
        flops = {node.index: node.layer.cost(1).flops_forward for node in model.graph.nodes}
        again = sum(flops[node.index] for part in self.segments.parts for node in part.nodes)
        self.share = again / max(sum(flops.values()), 1)

    def cells(self, node: Node) -> tuple[str, ...]:
        if not self.headings:
            return ()
        for number, part in enumerate(self.segments.parts, start=1):
            if node in part.nodes:
                kept = ", output kept" if node.index in self.segments.checkpoints else ""
                return (f"part {number}{kept}",)
        return ("",)


class _Parts:
    """The columns of a network that is cut over a mesh: layouts of outputs, and messages."""

    def __init__(self, model: ModelLike, memory: Memory) -> None:
        mesh, self.sent = model.mesh, memory.sent
        axes = {*mesh.model_axes} - {PIPELINE} if mesh else None
        self.headings = ("output is", "messages", "sent") if axes else ()
        self.messages = sum(volume.messages for volume in self.sent.values())
        self.nbytes = sum(volume.nbytes for volume in self.sent.values())

    def cells(self, node: Node) -> tuple[str, ...]:
        if not self.headings:
            return ()
        volume = self.sent.get(node.name)
        passes = isinstance(node.layer, Exchange)  # a whole array, with a partial gradient
        layout = ", ".join(
            f"{describe_state(state, len(node.shape))} along {axis}"
            for axis, state in node.layout.items()
            if isinstance(state, Cut) or (state is Spread.PARTIAL and not passes)
        )
        if volume is None:
            return (layout or "whole", "", "")
        return (layout or "whole", f"{volume.messages}", quantity(volume.nbytes, 1024, "B"))


def represent_model(model: ModelLike, description: Description) -> str:
    """Represent a model: a line for each layer with its name, options and output shape."""
    parts = description.parts
    shown = [part.layer if not part.same_as else f"same layer as {part.same_as}" for part in parts]
    rows = [
        (part.name, " ".join(str(layer).split()), " x ".join(map(str, part.shape)))
        for part, layer in zip(parts, shown, strict=True)
    ]
    count = sum(p.size for p in model.parameters.values())
    inputs = " and ".join(" x ".join(map(str, shape)) for _, shape in description.inputs)
    heading = f"Model: input {inputs}, {count:,} parameters, {model.dtype}, {model.backend.name}"
    return "\n".join([heading, *(f"  {line}" for line in align(rows, 3))])


def kinds(layer: Layer) -> list[str]:
    """Return the names of the original layers from which this one was fused."""
    if isinstance(layer, NormAddReLU):
        return [type(part).__name__ for part in layer.parts]
    if isinstance(layer, FusedConv2d):
        return [layer.replaced.__name__, *["ReLU"] * layer.relu]
    return [type(layer).__name__]
