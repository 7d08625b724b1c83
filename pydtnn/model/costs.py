"""Work of each layer, for traces."""

from __future__ import annotations

from typing import Any, Protocol

from pydtnn.layers.base import Layer
from pydtnn.model.graph import Graph
from pydtnn.utils.split import even_cut


class Network(Protocol):
    """The attribute of a `Model` that is used here."""

    graph: Graph


def layer_costs(model: Network, samples: int) -> dict[str, dict[str, Any]]:
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
        cost = layer.cost(own_samples(layer, samples))
        found[node.name] = {
            "type": type(layer).__name__,
            "parameters": sum(p.size for p in layer.parameters if p.source is p),
            "forward_flops": int(cost.flops_forward),
            "backward_flops": int(cost.flops_backward),
            "forward_bytes": int(cost.bytes_forward),
            "backward_bytes": int(cost.bytes_backward),
        }
    return found


def own_samples(layer: Layer, samples: int) -> int:
    """Return the samples that a layer computes on this rank, of those of its group's inputs."""
    if layer.batch_part is None:
        return samples
    place, ranks = layer.batch_part
    return even_cut(samples, ranks, place + 1) - even_cut(samples, ranks, place)
