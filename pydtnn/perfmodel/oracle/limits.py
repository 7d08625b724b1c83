"""The largest number of ranks of each strategy, and the layer that limits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydtnn.kernels import Backend
from pydtnn.kernels.dry import dry_backend
from pydtnn.layers.base import Layer
from pydtnn.layers.collectives import PIPELINE
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.linear import Linear
from pydtnn.layers.pool import AvgPool2d, MaxPool2d
from pydtnn.model.graph import Graph, shapes_of
from pydtnn.perfmodel.workload import Workload


@dataclass(frozen=True)
class Limit:
    """The number of ranks up to which a strategy divides the work of all layers.

    Attributes
    ----------
    kind : str
    ranks : int
    reason : str
        What limits it. Layers that cannot be divided among more ranks are computed by all of them.
    """

    kind: str
    ranks: int
    reason: str


def find_limits(work: Workload, backend: Backend) -> list[Limit]:
    """Return the limit of each strategy for a network.

    References
    ----------
    Kahira et al., "An oracle for guiding large-scale model/hybrid parallel training of
    convolutional neural networks", HPDC 2021, table 3, last column.
    """
    graph = Graph(shapes_of(work.input_shape), backend=dry_backend(backend, 1), dtype=work.dtype)
    graph.add(work.create_net(), *graph.inputs)
    layers = [node.layer for node in graph.nodes if node.inputs]
    batch = work.batch
    limits = [Limit("data", batch, f"{batch} samples in a step")]
    for kind, items in (("spatial", _rows), ("filter", _filters), ("channel", _channels)):
        found = sorted(items(layers), key=lambda item: item[0])
        if found:
            number, what = found[0]
            limits.append(Limit(kind, number, what))
    limits.append(Limit(PIPELINE, len(layers), f"{len(layers)} layers"))
    return limits


def _rows(layers: list[Layer]) -> Iterator[tuple[int, str]]:
    for layer in layers:
        if isinstance(layer, Conv2d | MaxPool2d | AvgPool2d):
            rows = layer.output_shape[0]
            extent = layer.kernel[0] // 2  # a stripe is not thinner than its halo
            least = max(extent * layer.stride[0], 1)
            most = min(rows, layer.input_shapes[0][0] // least)
            yield max(most, 1), f"{layer.name} has {rows} rows"


def _filters(layers: list[Layer]) -> Iterator[tuple[int, str]]:
    for layer in layers:
        if isinstance(layer, Conv2d):
            yield layer.filters, f"{layer.name} has {layer.filters} filters"
        if isinstance(layer, Linear):
            yield layer.features, f"{layer.name} has {layer.features} features"


def _channels(layers: list[Layer]) -> Iterator[tuple[int, str]]:
    first = True
    for layer in layers:
        if isinstance(layer, Conv2d | Linear):
            number = layer.input_shapes[0][-1]
            if not first:  # the channels of an image are not divided
                yield number, f"{layer.name} has {number} input channels"
            first = False
