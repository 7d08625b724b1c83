"""A model as a table: shapes, parameters, operations, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pydtnn.layers.base import Layer
from pydtnn.layers.collectives import PIPELINE
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.node import Node
from pydtnn.layers.parameters import Cut, Parameter
from pydtnn.model.description import Description
from pydtnn.model.memory import Volume, forecast_memory
from pydtnn.model.partition.exchange import Exchange, Spread, describe_state
from pydtnn.model.recompute import Segments, cut
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
            "parameters": _count(layer.parameters),
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
    nodes = model.graph.nodes[len(model.graph.inputs) :]
    costs = {node: node.layer.cost(1) for node in nodes}
    columns: dict[str, Callable[[Node], str]] = {
        "layer": lambda node: str(node.name),
        "type": lambda node: " + ".join(kinds(node.layer)),
        "output": lambda node: " x ".join(map(str, node.shape)),
        "parameters": lambda node: f"{_count(node.layer.parameters):,}",
        "flop": lambda node: quantity(costs[node].flops_forward, 1000),
        "kept": lambda node: size(memory.kept[node.index]),
    }
    segments = cut(model.graph.nodes, model.graph.trained, cuts)
    if cuts:
        columns["recomputed"] = partial(_part, segments)
    batch_of, counted = f"batch of {batch}", model.parameters.values()
    count, frozen = _count(counted), _count(p for p in counted if p.frozen)
    forward = sum(cost.flops_forward for cost in costs.values())
    backward = sum(cost.flops_backward for cost in costs.values())
    trained = f", of which {count - frozen:,} trained and {frozen:,} frozen" * bool(frozen)
    passes = f"{quantity(forward, 1000)}flop forward, {quantity(backward, 1000)}flop backward"
    totals = [
        ("parameters", f"{count:,} in {len(model.parameters)} arrays{trained}"),
        ("one sample", passes),
    ]
    if model.mesh and {*model.mesh.model_axes} - {PIPELINE}:
        sent = memory.sent
        columns["output is"] = _layout
        columns["messages"] = lambda n: f"{sent[n.name].messages}" if n.name in sent else ""
        columns["sent"] = lambda n: size(sent[n.name].nbytes) if n.name in sent else ""
        messages, nbytes = (sum(part) for part in zip(Volume(0, 0), *sent.values(), strict=True))
        words = (
            f"{messages:,} messages of {size(nbytes)} in a step to ranks with other parts of the"
        )
        totals.append((batch_of, f"{words} network"))
    kept = f"{size(sum(memory.kept))} kept for backward, {size(memory.peak)} at the peak of a step"
    copies = f"{size(memory.copies)} 16-bit copies, " * bool(memory.copies)
    arrays = f"{size(memory.parameters)} parameters, {copies}{size(memory.gradients)} gradients"
    extra = f"about {size(memory.scratch)} of it scratch memory of kernels"
    process = "process" if model.backend.name != "cuda" else "GPU"
    totals += [
        (batch_of, kept),
        ("of which", f"{arrays}, {size(memory.slots)} the optimizer's slots"),
        (process, f"{size(memory.resident)} more than before, {extra}"),
    ]
    if cuts:
        again = sum(costs[n].flops_forward for part in segments.parts for n in part.nodes)
        without = forecast_memory(model, batch, slots=slots, cuts=())
        words = (
            f"{again / max(forward, 1):.0%} of forward; without it, {size(sum(without.kept))} are"
        )
        totals.append(("recomputed", f"{words} kept and {size(without.peak)} are the peak"))
    if model.pipeline is not None:
        totals.append(("pipeline", model.pipeline.describe()))
    if memory.pool:  # arrays of small networks are not allocated from it
        totals.append(("memory pool", f"{size(memory.pool)} at the peak of a step"))
    rows = [[cell(node) for cell in columns.values()] for node in nodes]
    table = align([[*columns], *rows], LEFT_ALIGNED)
    rule = "-" * max(map(len, table))
    return Summary("\n".join([table[0], rule, *table[1:], rule, *align(totals, 2)]))


def size(nbytes: float) -> str:
    """Format a number of bytes."""
    return quantity(nbytes, 1024, "B")


def _count(parameters: Iterable[Parameter]) -> int:
    """Return the number of elements; shared parameters are counted at their first use."""
    return sum(p.size for p in parameters if p.source is p)


def _part(segments: Segments, node: Node) -> str:
    """Return the recomputed part of a node."""
    for number, part in enumerate(segments.parts, start=1):
        if node in part.nodes:
            return f"part {number}" + ", output kept" * (node.index in segments.checkpoints)
    return ""


def _layout(node: Node) -> str:
    """Return how the output of a node is spread over a mesh."""
    passes = isinstance(node.layer, Exchange)  # a whole array, with a partial gradient
    words = (
        f"{describe_state(state, len(node.shape))} along {axis}"
        for axis, state in node.layout.items()
        if isinstance(state, Cut) or (state is Spread.PARTIAL and not passes)
    )
    return ", ".join(words) or "whole"


def represent_model(model: ModelLike, description: Description) -> str:
    """Represent a model: a line for each layer with its name, options and output shape."""
    parts = description.parts
    shown = [part.layer if not part.same_as else f"same layer as {part.same_as}" for part in parts]
    rows = [
        (part.name, " ".join(str(layer).split()), " x ".join(map(str, part.shape)))
        for part, layer in zip(parts, shown, strict=True)
    ]
    count = _count(model.parameters.values())
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
