"""Formulas of the projections that ParaDL's tool has printed, where they differ from Table III."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from benchmarks.paradl.case import Case, Link
from benchmarks.paradl.layers import LayerSize
from benchmarks.paradl.published import Layers, Published

STAGED = Link(3e-3 + 110e-9, 1 / 16e9)
"""Messages between GPUs of a host through its memory and a PCIe switch, as measured."""

SWITCHED = Link(20e-6 + 110e-9, 1 / 16e9)
"""Messages between GPUs of a host through a PCIe switch."""


@dataclass(frozen=True)
class Version:
    """What a version of the tool counts as messages of hybrids and of stripes.

    Attributes
    ----------
    link : Link, optional
        Of halos and gathers; by default that of the platform.
    halo_flows, gather_flows : int
        Messages that share a link: halos and gathers.
    spatial_flows, filter_flows : int
        Messages that share a link: the all-reduce between the groups of data + spatial, and of data
        + filter.
    own_weights : bool
        Whether the latter has the weights of a rank, not all weights.
    channels : bool
        Whether halos have all channels of the input, in both passes; otherwise they have one row of
        the output in forward, and one of the input in backward.
    samples : bool
        Whether halos have all samples of a group, not one.
    whole : bool
        Whether layers with windows that are not divided have halos, too.
    parts : bool
        Whether a message of the gather is the part of a rank, not the output of the group.
    """

    link: Link | None = None
    halo_flows: int = 1
    gather_flows: int = 1
    spatial_flows: int = 1
    filter_flows: int = 1
    own_weights: bool = False
    channels: bool = False
    samples: bool = False
    whole: bool = False
    parts: bool = True


LATEST = Version(STAGED, 8, 2, 8, 8, channels=True, samples=True)
WHOLE_GATHER = replace(LATEST, parts=False)
RINGS = Version(filter_flows=4, own_weights=True)
PAIRS = Version(None, 1, 1, 4, 2, own_weights=True, whole=True)

VERSIONS = {
    "ranking_log/cosmoflow_256.log": LATEST,
    "ranking_log/cosmoflow.log": WHOLE_GATHER,
    "ranking_log/resnet/1024/cosmoflow.log_2": replace(WHOLE_GATHER, spatial_flows=2),
    "ranking_log/vgg/ds.log": WHOLE_GATHER,
    "ranking_log/vgg/df.log2": Version(),
    "ranking_log/resnet/4/spatial.log": Version(),
    "ranking_log/resnet/16/data+spatial.log": Version(
        SWITCHED, 16, 16, 2, samples=True, whole=True
    ),
    "ranking_log/resnet/16/df.log": RINGS,
    "ranking_log/resnet/64/data+spatial.log": Version(STAGED, 4, 4, 2, samples=True, whole=True),
    "ranking_log/resnet/64/df.log": RINGS,
    "resnet_ranking.log": replace(RINGS, spatial_flows=4, whole=True),
    "resnet_ranking_2.log": PAIRS,
}
"""Versions of the tool by the published projections that they have printed; others are the same in
all of them."""


class Printed(Published):
    """Table III with the deviations of the published tool.

    - The memory of filter and channel parallelism divides the weights of divided layers by p twice,
      and all other weights by p.
    - The samples of a rank are rounded up to whole ones in data parallelism.
    - Data + filter computes whole steps, the last one as long as the others.
    - Spatial and data + spatial count ReLU and batch norm in memory, and round parts of layers up
      to whole values.
    - Data + spatial leaves out all layers after the last one that is divided, in time and memory.
    - Spatial gathers the output of the last layer that is divided.
    - The versions of the tool count the messages of stripes and between groups differently: see
      `Version`; in the latest one, the all-reduce between the groups of a hybrid sends all weights,
      and its bandwidth is divided by 2 p2, as p2 rings share a network card.

    Parameters
    ----------
    case : Case
    version : Version
        Of the tool.
    """

    def __init__(self, case: Case, version: Version = LATEST) -> None:
        super().__init__(case)
        self.version = version

    def passes(self, groups: int, parts: int) -> float:
        """Return the time of the passes of an epoch, of whole samples or steps."""
        layers = self.until_gather() if self.case.strategy == "data+spatial" else self.layers
        samples = ceil(self.samples / groups)
        if self.case.strategy == "data+filter":
            samples = ceil(self.batch * self.steps / groups)
        return samples * sum((x.forward + x.backward) * self.share(x, parts) for x in layers)

    def until_gather(self) -> Layers:
        """Return the layers up to the last one that is divided."""
        last = max((i for i, x in enumerate(self.layers) if x.split), default=-1)
        return self.layers[: last + 1]

    def values(self, layers: Layers, samples: float, maps: int, weights: int) -> float:  # type: ignore[override]
        """Return the bytes of layers with maps and weights that are divided."""
        if "spatial" in self.case.strategy:
            kept = self.until_gather() if self.case.strategy == "data+spatial" else layers
            parts = [(x, maps if x.split else 1) for x in kept]
            items = sum(ceil(x.items_x / own) + ceil(x.items_y / own) for x, own in parts)
            return 2 * self.case.item * (samples * items + sum(x.items_w for x in layers))
        own = super().values(layers, samples, maps, weights)
        if self.case.strategy not in ("filter", "channel"):
            return own
        kept = tuple(x for x in layers if x.in_memory)
        once = sum(x.items_w / (weights if x.split else 1) for x in kept)
        return own - 2 * self.case.item * once * (1 - 1 / weights)

    def data_filter_communication(self) -> float:
        """Return the layer-wise messages of a group, and the gradients between groups."""
        inside = self.layerwise(self.p2, self.batch / self.p1)
        parts = self.p2 if self.version.own_weights else 1
        weights = sum(x.items_w / (parts if x.split else 1) for x in self.layers)
        link, flows = self.case.link(self.p), self.version.filter_flows
        return self.steps * (inside + self.ring(self.p1, weights, link, flows))

    def data_spatial_communication(self) -> float:
        """Return halos and gather of a group, the reduction inside it, and that between groups."""
        weights = float(sum(x.items_w for x in self.layers))
        link, flows = self.case.link(self.p), self.version.spatial_flows
        within = self.ring(self.p2, weights, self.case.link(self.p2))
        between = self.ring(self.p1, weights, link, flows)
        return self.steps * (self.halos(self.p2) + within + between)

    def halos(self, ranks: int) -> float:
        """Return the time of all halos and of both gathers, per step."""
        if ranks == 1:
            return 0.0
        link, version = self.version.link or self.case.link(ranks), self.version
        samples = self.batch / self.p1
        per_item = self.case.item * link.beta
        rows = (samples if version.samples else 1) * per_item * version.halo_flows
        halo = sum(2 * (link.alpha + values * rows) for values in self.rows())
        last = self.until_gather()[-1:]
        part = samples * per_item * version.gather_flows / (ranks if version.parts else 1)
        gather = sum((ranks - 1) * (link.alpha + x.items_y * part) for x in last)
        return halo + 2 * gather

    def rows(self) -> Iterator[int]:
        """Yield the values per sample of the halos of each layer with windows, in both passes."""
        for x in self.until_gather():
            if max(x.kernel, default=1) > 1 and (x.split or self.version.whole):
                if self.version.channels:
                    yield from (x.halo(x.x), x.halo(x.x))
                else:
                    yield from (_row(x, x.y), _row(x, x.x))


def _row(layer: LayerSize, shape: tuple[int, ...]) -> int:
    """Return (K - 1) / 2 rows of one channel, as the tool counts them."""
    return (layer.kernel[0] - 1) // 2 * shape[1]
