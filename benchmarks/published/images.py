"""The step of a network of images with data parallelism, from the layers of `models`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from benchmarks.published.rows import Published
from benchmarks.published.transformer import Messages
from pydtnn.kernels.dry import dry_backend
from pydtnn.layers import Add, BatchNorm, Conv2d, Net, ReLU
from pydtnn.layers.base import Layer
from pydtnn.model.graph import Graph, shapes_of
from pydtnn.tools.perfmodel import Platform
from pydtnn.tools.perfmodel.compute.accelerator import Accelerator
from pydtnn.training.workload import Workload

FUSED = {BatchNorm: (2 / 3, 3 / 5), ReLU: (0.0, 0.0), Add: (1 / 3, 0.0)}
"""Parts of forward and backward that remain if norms with additions and ReLU are one kernel, which
keeps a channel in the chip (cuDNN's "persistent" norms)."""

BUCKETS = 4
"""Sums of gradients that follow one another; the last one begins when backward has ended."""

UPDATE, PACKED = 20, 24
"""Bytes for a parameter: gradient, value and momentum, the latter two read and written; and those
of three copies of a gradient."""


@cache
def layers_of(model: str, size: int, version: int = 0) -> list[Layer]:
    """Return the layers of a network of 1,000 classes.

    In version 1 of a ResNet (He et al. 2016), the stride of a bottleneck is in its first
    convolution.
    """
    work = Workload(model, (size, size, 3), classes=1000)
    dry = dry_backend(work.create_backend(), 1)
    graph = Graph(shapes_of(work.input_shape), backend=dry, dtype="float32")
    net = work.create_net()
    for first, second in pairwise(_convolutions(net)):
        if version == 1 and first.kernel == (1, 1) and second.kernel == (3, 3):
            first.stride, second.stride = second.stride, first.stride
    graph.add(net, *graph.inputs)
    layers = [node.layer for node in graph.nodes if node.inputs]
    layers[0].needs_dx = False
    return layers


def _convolutions(net: Net) -> Iterator[Conv2d]:
    if isinstance(net, Conv2d):
        yield net
    for part in getattr(net, "parts", ()):
        yield from _convolutions(part)


def seconds(row: Published, platform: Platform) -> float:
    """Predict the time of a step, in s."""
    device, layers = (
        Accelerator(platform, row.precision),
        layers_of(row.network, row.shape, row.version),
    )
    device.winograd = device.winograd and row.winograd
    times = [0.0, 0.0]
    for layer in layers:
        parts = FUSED.get(type(layer), (1.0, 1.0)) if row.fused else (1.0, 1.0)
        for backward, part in enumerate(parts):
            times[backward] += part * device.layer(layer, row.batch // row.devices, bool(backward))
    parameters = sum(p.size for layer in layers for p in layer.parameters) + row.added
    sums = Messages(row, platform).collective("allreduce", "data", parameters * device.itemsize)
    hidden = (1 - 1 / BUCKETS) * times[1]
    exposed = max(sums - hidden, sums / BUCKETS) if row.overlap else sums
    nbytes = (UPDATE + PACKED * (row.packed and row.devices > 1)) * parameters
    return sum(times) + exposed + device.moved(nbytes, 4)
