"""Compute times from the figures of a platform: the roofline of each layer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from pydtnn.kernels import ConvGeometry
from pydtnn.kernels.cpu.conv import candidates
from pydtnn.layers.base import Layer
from pydtnn.layers.conv import Conv2d
from pydtnn.layers.experts import Experts
from pydtnn.layers.linear import Linear
from pydtnn.model.partition.striped_conv import StripedConv2d
from pydtnn.model.summary import local_samples
from pydtnn.tools.perfmodel.compute.accelerator import Accelerator
from pydtnn.tools.perfmodel.compute.base import ComputeCosts, Label
from pydtnn.tools.perfmodel.compute.classes import Rates, classify
from pydtnn.tools.perfmodel.entries import DIRECTIONS
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.training.workload import Workload


class Winograd(NamedTuple):
    """Operations of Winograd's algorithm, by tile.

    Attributes
    ----------
    tile : int
        Outputs of a tile along each axis along which a filter has more than one tap.
    products : int
        Multiplications along an axis for each channel and filter, of a tile with all outputs.
    data, filters, inverse : int
        Additions of the transforms of a tile of a channel, of a filter, and of a result.
    """

    tile: int
    products: int
    data: int
    filters: int
    inverse: int


WINOGRAD: dict[tuple[object, ...], Winograd] = {
    ("winograd2", 3, 3): Winograd(2, 4, 32, 28, 24),
    ("winograd4", 3, 3): Winograd(4, 6, 156, 72, 90),
    ("polyphase", 3, 3): Winograd(4, 9, 400, 224, 108),
    ("polyphase", 5, 5): Winograd(4, 11, 576, 288, 130),
    ("polyphase", 7, 7): Winograd(3, 11, 576, 480, 90),
    ("winograd4", 5, 5): Winograd(4, 11, 624, 288, 90),
    ("winograd4", 3): Winograd(4, 6, 13, 8, 10),
    ("winograd4", 5): Winograd(4, 11, 26, 16, 10),
    ("winograd5", 7): Winograd(5, 15, 48, 24, 18),
}
"""By name and taps along the axes with more than one. Of 3x3 and a stride of 1: Lavin and Gray,
Fast algorithms for convolutional neural networks, 2016, sections 4.1 and 4.3; the others: as
implemented in `conv_winograd_points.h`, of all phases or parts."""


def work_of(geometry: ConvGeometry, batch: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Return the work of one pass (forward, dw or dx) by each algorithm of the CPU's kernels.

    Parameters
    ----------
    geometry : ConvGeometry
    batch : int
    itemsize : int
        Length of an element, in B.

    Yields
    ------
    flops : int
        Operations at the peak of multiply-adds; an addition of a transform counts twice, because it
        takes as long as a multiply-add.
    nbytes : int
        Bytes of transformed filters, besides those of `Layer.cost`.
    """
    for name in candidates(geometry):
        own = WINOGRAD.get((name, *(taps for taps in geometry.kernel[-2:] if taps > 1)))
        if own is None:
            yield geometry.flops(batch), 0
            continue
        channels, filters = geometry.channels, geometry.filters
        of_tile = [(own.tile, own.products) if taps > 1 else (1, 1) for taps in geometry.kernel]
        tiles = [-(-n // tile) for n, (tile, _) in zip(geometry.output, of_tile, strict=True)]
        # tiles at the end of an axis may have an output less, and then they have a product less
        products = prod(
            t * each - min(t * tile - n, t)
            for t, n, (tile, each) in zip(tiles, geometry.output, of_tile, strict=True)
        )
        transforms = 2 * (own.data * channels + own.inverse * filters)
        weights = channels * filters
        yield (
            batch * (2 * products * weights + prod(tiles) * transforms) + 2 * own.filters * weights,
            2 * prod(each for _, each in of_tile[-2:]) * weights * itemsize,
        )


def accesses(slots: int, clipping: int = 0) -> int:
    """Return how many numbers an update reads and writes for each parameter.

    `clipping` are those of clipping: `Workload.clipping`.
    """
    return 3 + 2 * slots + clipping


class AnalyticCosts(ComputeCosts):
    """The time of the arithmetic, of the bytes and of Python, for each pass of a layer.

    Operations and bytes are those of `Layer.cost`. With a platform's achieved rates, convolutions
    and matrix products take the time that layers of the same class took there, nominal operations
    counted: fast algorithms may exceed the peak.

    Otherwise, and for classes without a rate, the times at the peak rate and at the bandwidth of
    memory are added: a kernel of the CPU that waits for memory computes little meanwhile. For
    convolutions, the fastest of the CPU's algorithms counts.

    Of a device with `Compute.kernels`, layers take the time of its kernels (`Accelerator`).

    The first segment of a pass contains all of it; if a stripe's interior is computed while its
    halo travels, the second one does. The last phase "update" of a step (by the number of them in
    the step before; the first one of the first step) contains the update of all parameters. An
    object may be used by several ranks that are threads.

    Parameters
    ----------
    platform : Platform
    dtype : str, default "float32"
        Type of the model, for the peak.
    peaks_only : bool, default False
        Ignore achieved rates.
    slots : int, default 1
        Slots of the optimizer: an update reads and writes them, reads gradients, and reads and
        writes parameters.
    clipping : int, default 0
        Numbers that clipping reads and writes for each parameter.
    parts : int, default 1
        Ranks each of which updates its part of the parameters.

    Raises
    ------
    ValueError
        If the platform has no peak for the type.

    References
    ----------
    Williams, Waterman, Patterson, Roofline: an insightful visual performance model for multicore
    architectures, 2009.
    """

    constant = True

    def __init__(
        self,
        platform: Platform,
        dtype: str = "float32",
        *,
        peaks_only: bool = False,
        slots: int = 1,
        clipping: int = 0,
        parts: int = 1,
    ) -> None:
        compute = platform.compute
        self._dtype = dtype
        self._options = {"slots": slots, "clipping": clipping, "parts": parts}
        self._peaks_only = peaks_only
        if dtype not in compute.peak:
            raise ValueError(
                f"platform {platform.name}: expected a peak for {dtype}, got those for "
                f"{', '.join(compute.peak) or 'no type'}; add compute.peak.{dtype}"
            )
        self._peak, self._bandwidth = compute.peak[dtype], platform.rank_bandwidth
        self._call, self._step = compute.call, compute.step
        # rates are those of float32; other types have the same share of their peak
        self._scale = self._peak / compute.peak.get("float32", self._peak)
        self._accelerator = (
            Accelerator(platform, dtype) if compute.kernels and not peaks_only else None
        )
        self._rates = Rates({} if peaks_only else compute.rates)
        self._bandwidths = {} if peaks_only else compute.bandwidths
        own = self._bandwidth if peaks_only else platform.update_bandwidth
        self._update = accesses(slots, clipping) / own / parts  # s for each byte of parameters
        self._trained = threading.local()  # of this rank: `bytes` of layers, and counts of updates

    @classmethod
    def of(cls, work: Workload, platform: Platform) -> AnalyticCosts:
        """Return the costs of a run: its type, and the update by its optimizer.

        Raises
        ------
        ValueError
            If ranks have another number of threads than those of the platform.
        """
        threads = platform.compute.threads
        if work.threads not in (None, threads):
            raise ValueError(
                f"platform {platform.name}: expected ranks of {threads} threads, which its rates "
                f"are for, got threads {work.threads}; omit it, or measure times"
            )
        clipping, parts = work.clipping, work.parts
        return cls(platform, work.dtype, slots=work.slots, clipping=clipping, parts=parts)

    def on(self, platform: Platform) -> AnalyticCosts:
        return type(self)(platform, self._dtype, peaks_only=self._peaks_only, **self._options)

    def seconds(self, label: Label, layer: Layer | None, batch: int) -> float:
        """Return the time of a segment, in s.

        Those of phases are the time of Python per step, in the first segment of the phase "step",
        and updates.
        """
        if layer is None:
            return self._phase(label)
        if label.index != int(isinstance(layer, StripedConv2d)):
            return 0.0
        batch = local_samples(layer, batch)
        if label.kind == "forward":
            return self._pass(layer, False, batch)
        own = (p for p in layer.parameters if p.source is p and not p.frozen)
        trained = vars(self._trained).setdefault("bytes", {})
        trained[id(layer)] = sum(p.size for p in own) * layer.parameter_dtype.itemsize
        return label.share * self._pass(layer, True, batch)

    def _phase(self, label: Label) -> float:
        own = vars(self._trained)
        if label == Label("phase", "step", 0):
            own["most"], own["count"] = own.get("count", 0) or 1, 0
            return self._step
        if label != Label("phase", "update", 0):
            return 0.0
        if trained := own.pop("bytes", None):
            own["total"] = sum(trained.values())
        own["count"] = own.get("count", 0) + 1
        return self._update * own.get("total", 0) if own["count"] == own.get("most", 1) else 0.0

    def _pass(self, layer: Layer, backward: bool, batch: int) -> float:
        if self._accelerator is not None:
            return self._call + self._accelerator.layer(layer, batch, backward)
        flops, moved = layer.cost(batch).of_pass(backward)
        kind, direction = classify(layer), DIRECTIONS[backward]
        rate = self._rates.of(kind, direction)
        if rate is not None:
            # rates of convolutions contain their bytes; a matrix has more of them for few samples
            matrix = moved / self._bandwidth if isinstance(layer, Linear | Experts) else 0.0
            return self._call + max(flops / (rate * self._scale), matrix)
        bandwidth = self._bandwidths.get(kind.entry(direction), self._bandwidth)
        seconds = self._call + flops / self._peak + moved / bandwidth
        if not isinstance(layer, Conv2d):
            return seconds
        passes = (not layer.w.frozen) + layer.needs_dx if backward else 1
        itemsize = layer.dtype.itemsize
        return seconds - passes * _saved(
            layer.geometry, batch, itemsize, self._peak, self._bandwidth
        )


@lru_cache(maxsize=4096)
def _saved(
    geometry: ConvGeometry, batch: int, itemsize: int, peak: float, bandwidth: float
) -> float:
    """Return what the fastest algorithm saves of the time of the nominal operations, in s."""
    work = work_of(geometry, batch, itemsize)
    fastest = min(flops / peak + nbytes / bandwidth for flops, nbytes in work)
    return geometry.flops(batch) / peak - fastest
