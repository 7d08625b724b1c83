"""Classes of kernels: layers whose rates differ little, and how a rate depends on channels."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from pydtnn.kernels.cpu.volumes import planes_of
from pydtnn.layers.attention import DotProductAttention
from pydtnn.layers.base import Layer
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.experts import Experts
from pydtnn.layers.fused_conv import FusedConv2d
from pydtnn.layers.fused_norm import NormAddReLU
from pydtnn.layers.linear import Linear
from pydtnn.layers.norm import BatchNorm, GroupNorm
from pydtnn.layers.pool import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from pydtnn.layers.recurrent import RecurrentLayer
from pydtnn.layers.signal import AvgPool1d, Conv1d, GlobalAvgPool1d, MaxPool1d
from pydtnn.layers.volume import AvgPool3d, Conv3d, GlobalAvgPool3d, MaxPool3d
from pydtnn.tools.perfmodel.entries import KernelClass, read_rate

IMAGE = 4
"""Channels up to which a convolution's input is an image."""

POOLS = (
    *(MaxPool1d, AvgPool1d, GlobalAvgPool1d),
    *(MaxPool2d, AvgPool2d, AdaptiveAvgPool2d),
    *(MaxPool3d, AvgPool3d, GlobalAvgPool3d),
)


def classify(layer: Layer) -> KernelClass:
    """Return the class of a layer's kernels.

    Convolutions differ by window, by channels, and by whether norms are fused with them; those of
    volumes are in the classes of the convolutions of planes that compute them. Other layers are
    limited by memory, except for `Linear`, experts, attention and recurrent layers, which multiply
    matrices.
    """
    if isinstance(layer, Conv1d | Conv2d | Conv3d):
        g = planes_of(layer.geometry) if isinstance(layer, Conv3d) else layer.geometry
        size = round(math.sqrt(g.channels * g.filters))
        if g.channels == g.groups > 1:
            return KernelClass("conv depthwise", size)
        if g.channels <= IMAGE:
            return KernelClass("conv of images", size)
        fused = isinstance(layer, FusedConv2d) and (layer.evaluation.operations or layer.norm)
        window = "x".join(map(str, (1, *g.kernel)[-max(len(g.kernel), 2) :]))
        slow = max(g.stride) > 1 or max(g.dilation) > 1 or g.groups > 1
        kind = f"conv {window}" if window in ("1x1", "3x3") and not slow else "conv other"
        return KernelClass(f"{kind} fused" if fused else kind, size)
    if isinstance(layer, Linear):
        return KernelClass("linear", round(math.sqrt(layer.w.size)))
    if isinstance(layer, Experts):
        return KernelClass("linear", round(math.sqrt(layer.output_shape[-1] * layer.hidden)))
    if isinstance(layer, DotProductAttention):  # products of (T, E) matrices, of keys in a window
        keys, features = layer.input_shapes[layer.sequences - 1][0], layer.output_shape[1]
        keys = keys if layer.window is None else min(keys, layer.window * (2 - layer.causal))
        return KernelClass("linear", round(math.sqrt(keys * features / layer.heads)))
    if isinstance(layer, RecurrentLayer):
        return KernelClass("linear", round(math.sqrt(layer.w.size + layer.u.size)))
    if isinstance(layer, BatchNorm | GroupNorm | NormAddReLU):
        return KernelClass("norm")
    if isinstance(layer, POOLS):
        return KernelClass("pool")
    return KernelClass("elementwise")


class Rates:
    """Rates by class and direction, interpolated between the sizes that were measured.

    Parameters
    ----------
    rates : mapping of str to float
        In flop/s, by `KernelClass.entry`.
    """

    def __init__(self, rates: Mapping[str, float]) -> None:
        points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for entry, rate in rates.items():
            kind, direction = read_rate(entry)
            points[kind.name, direction].append((math.log(kind.size), math.log(rate)))
        self._tables = {key: np.array(sorted(own)).T for key, own in points.items()}

    def of(self, kind: KernelClass, direction: str) -> float | None:
        """Return the rate of a class, in flop/s; None if it is not known.

        Between two sizes it is interpolated, both on logarithmic scales; outside of all it is that
        of the nearest.
        """
        table = self._tables.get((kind.name, direction))
        if table is None:
            return None
        return math.exp(np.interp(math.log(max(kind.size, 1)), *table))
