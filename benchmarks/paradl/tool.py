"""Formulas of the projections that ParaDL's tool has printed, where they differ from Table III."""

from __future__ import annotations

from benchmarks.paradl.case import Link
from benchmarks.paradl.published import Layers, Published

STAGING = Link(3e-3 + 110e-9, 1 / 16e9)
"""Messages of halos and gathers between GPUs of a host: through its memory and a PCIe switch."""


class Printed(Published):
    """Table III with the deviations of the published tool.

    - The memory of filter and channel parallelism divides the weights of divided layers by p twice,
      and all other weights by p.
    - Data + filter computes whole steps, the last one as long as the others.
    - The all-reduce between the groups of a hybrid sends all weights, and its bandwidth is divided
      by 2 p2, as p2 rings share a network card.
    - Halos and gathers of data + spatial pass through the memory of the host, which 2 p2 and 2 of
      them share; halos in backward are as large as in forward, and the gather counts the whole
      output of a group. Only the communication of this strategy is that of the tool.
    """

    def passes(self, groups: int, parts: int) -> float:
        """Return the time of the passes of an epoch; of whole steps for hybrids."""
        own = super().passes(groups, parts)
        if self.case.strategy != "data+filter":
            return own
        return own / self.samples * self.batch * self.steps

    def values(self, layers: Layers, samples: float, maps: int, weights: int) -> float:  # type: ignore[override]
        """Return the bytes of layers with maps and weights that are divided."""
        own = super().values(layers, samples, maps, weights)
        if self.case.strategy not in ("filter", "channel"):
            return own
        kept = [x for x in layers if x.in_memory]
        once = sum(x.items_w / (weights if x.split else 1) for x in kept)
        return own - 2 * self.case.item * once * (1 - 1 / weights)

    def data_filter_communication(self) -> float:
        """Return the layer-wise messages of a group, and the gradients between groups."""
        inside = self.layerwise(self.p2, self.batch / self.p1)
        return self.steps * (inside + self.between())

    def between(self) -> float:
        """Return the all-reduce of all weights between groups that share cards, per step."""
        weights = float(sum(x.items_w for x in self.layers))
        return self.ring(self.p1, weights, self.case.link(self.p), flows=2 * self.p2)

    def data_spatial_communication(self) -> float:
        """Return halos and gather of a group, the reduction inside it, and that between groups."""
        weights = float(sum(x.items_w for x in self.layers))
        reduce = self.ring(self.p2, weights, self.case.link(self.p2))
        return self.steps * (self.halos(self.p2) + 2 * self.gather() + reduce + self.between())

    def halos(self, ranks: int) -> float:
        """Return the time of the halos of all layers with windows, per step."""
        if self.case.strategy != "data+spatial":
            return super().halos(ranks)
        per_item = self.batch / self.p1 * self.case.item * STAGING.beta * 2 * self.p2
        windows = (x for x in self.layers if x.split and any(k > 1 for k in x.kernel))
        return sum(4 * (STAGING.alpha + x.halo(x.x) * per_item) for x in windows)

    def gather(self) -> float:
        """Return the time to gather the output of the last layer that is divided, per step."""
        last = [x for x in self.layers[:-1] if x.split][-1:]
        per_item = self.batch / self.p1 * self.case.item * STAGING.beta * 2
        return sum((self.p2 - 1) * (STAGING.alpha + x.items_y * per_item) for x in last)
