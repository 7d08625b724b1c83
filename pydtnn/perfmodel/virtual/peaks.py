"""Compute times from the peak rates of a platform."""

from __future__ import annotations

from pydtnn.layers.base import Layer
from pydtnn.perfmodel.compute.base import ComputeCosts, Label
from pydtnn.perfmodel.platform import Platform


class PeakCosts(ComputeCosts):
    """The larger of arithmetic and memory time of each pass, and the time of Python per call.

    Parameters
    ----------
    platform : Platform
    dtype : str
        Of the model; the peak is that of float32 if the platform has none for it.
    """

    def __init__(self, platform: Platform, dtype: str) -> None:
        compute = platform.compute
        self._peak = compute.peak.get(dtype) or compute.peak["float32"]
        self._bandwidth = compute.memory_bandwidth
        self._call, self._step = compute.call, compute.step

    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        if label.index:
            return 0.0
        if layer is None:
            return self._step if label == Label("phase", "step") else 0.0
        cost = layer.cost(batch)
        backward = label.kind == "backward"
        flops = cost.flops_backward if backward else cost.flops_forward
        moved = cost.bytes_backward if backward else cost.bytes_forward
        return self._call + max(flops / self._peak, moved / self._bandwidth)
