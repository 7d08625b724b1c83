"""Costs of compute from the peaks of a platform only."""

from __future__ import annotations

from pydtnn.layers.base import Layer
from pydtnn.layers.halo_conv import HaloConv2d
from pydtnn.perfmodel.compute import ComputeCosts, Label
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.timing import bandwidth_of


class PeakCosts(ComputeCosts):
    """The roofline of each layer, with the peaks of a platform: a lower bound of its time.

    A pass takes the time of its operations or that of its bytes, whichever is longer, and that of
    Python. All of it is in the first segment of the pass, except for layers with a halo, whose
    interior is computed while the halo travels.

    Parameters
    ----------
    platform : Platform
    dtype : str

    References
    ----------
    Williams, Waterman, Patterson, Roofline: an insightful visual performance model for multicore
    architectures, 2009.
    """

    def __init__(self, platform: Platform, dtype: str = "float32") -> None:
        peaks = platform.compute.peak
        self.rate = peaks.get(dtype, max(peaks.values()))
        self.bandwidth = bandwidth_of(platform)
        self.call = platform.compute.call

    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        """Return the time of a segment, in s."""
        if layer is None or label.index != _main_segment(layer):
            return 0.0
        cost = layer.cost(batch)
        if label.kind == "forward":
            flops, moved = cost.flops_forward, cost.bytes_forward
        else:
            flops, moved = cost.flops_backward, cost.bytes_backward
        return self.call + max(flops / self.rate, moved / self.bandwidth)


def _main_segment(layer: Layer) -> int:
    """Return the segment with the kernels: the interior of a stripe, otherwise the first."""
    return 1 if isinstance(layer, HaloConv2d) else 0
