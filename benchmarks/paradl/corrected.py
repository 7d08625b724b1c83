"""Table III with its mistakes mended."""

from __future__ import annotations

from math import ceil, prod

from benchmarks.paradl.layers import LayerSize
from benchmarks.paradl.published import Layers, Published

CORRECTIONS = {
    "whole steps": "computation is that of whole steps, as communication is, with the samples of "
    "the rank that has the most; published: D / p samples",
    "uneven parts": "a rank computes ceil(F / p) of F filters, channels or rows; published: F / p",
    "inputs of layers": "gradients of inputs are counted with |x|, for all divided layers but the "
    "first; published: |y| of the layer before, which is wrong at branches and pools",
    "channels": "forward sums y and backward gathers dx, and the first layer is whole; published: "
    "as for filters",
    "overlap": "layers' gradients are exchanged while backward runs, if that is faster than one "
    "exchange after it; published: no overlap",
    "contention": "rings of ranks of one host share its network card; published: each has it alone",
    "gather": "divided maps are gathered before the first whole layer; published: nothing",
    "halos": "windows of even size read K - 1 rows of neighbours in total; published: K - 1 "
    "rounded down to an even number",
    "updates of a pipeline": "weights are updated once per step; published: once per round",
    "work of backward": "a total time is divided in proportion to operations with gradients of "
    "weights as expensive as forward, and pools of one channel; published: one operation per "
    "weight",
    "memory": "outputs are stored once, with two gradients of the largest map and, for each "
    "weight, its gradient and one value of the optimizer; published: inputs, outputs and weights "
    "twice, without ReLU and batch norm",
}
"""Names and descriptions of the corrections."""

SLOTS = 1
"""Values of the optimizer per weight: momentum."""


class Corrected(Published):
    """Terms of the table with `CORRECTIONS`."""

    def passes(self, groups: int, parts: int) -> float:
        """Return the time of the passes of an epoch, of whole steps."""
        own = sum((x.forward + x.backward) * self.share(x, parts) for x in self.layers)
        return self.steps * ceil(self.batch / groups) * own

    def share(self, layer: LayerSize, parts: int) -> float:
        """Return the part of a layer that the rank with the most computes."""
        if parts == 1 or not self.divides(layer):
            return 1.0
        size = self.size(layer)
        return ceil(size / parts) / size if size else 1.0

    def divides(self, layer: LayerSize) -> bool:
        """Return whether a strategy divides a layer."""
        whole = self.case.strategy == "channel" and layer is self.layers[0]
        return layer.split and not whole

    def size(self, layer: LayerSize) -> int:
        """Return the number of filters, channels or rows that are divided."""
        if "spatial" in self.case.strategy:
            return layer.rows
        if self.case.strategy == "channel":
            return layer.x[0] if layer.x else 0
        return layer.y[0] if layer.y else 0

    def update(self, parts: int) -> float:
        """Return the time of the update of a rank's weights, per step."""
        return sum(x.update * (self.share(x, parts) if parts > 1 else 1) for x in self.layers)

    def pipeline_update(self, rounds: float) -> float:
        """Return the time of one update per step of the slowest stage."""
        return self.steps * max(sum(x.update for x in own) for own in self.stages())

    def gradients(self, ranks: int) -> float:
        """Return the time of the exchange of gradients that backward does not hide, per step."""
        link = self.case.link(self.p)
        at_once = self.ring(ranks, float(sum(x.items_w for x in self.layers)), link)
        parts = self.p if self.case.strategy == "spatial" else 1
        per_rank = ceil(self.batch / (self.p if parts == 1 else 1))
        clock = network = 0.0
        for x in reversed(self.layers):
            clock += per_rank * x.backward * self.share(x, parts)
            if x.has_weights:
                network = max(network, clock) + self.ring(ranks, float(x.items_w), link)
        return min(at_once, max(0.0, network - clock))

    def layerwise(self, ranks: int, samples: float) -> float:
        """Return the all-gather and all-reduce of each divided layer, per step."""
        link = self.case.link(ranks)
        per_item = self.case.item * link.beta

        def one(values: int) -> float:
            return (ranks - 1) * (link.alpha + samples * values / ranks * per_item)

        found = 0.0
        for x in self.layers:
            if not self.divides(x) or ranks == 1:
                continue
            last, first = x is self.layers[-1], x is self.layers[0]
            if self.case.strategy == "channel":
                found += 2 * one(x.items_y) + (0.0 if first else one(x.items_x))
            else:
                found += (0.0 if last else one(x.items_y)) + (0.0 if first else 2 * one(x.items_x))
        return found

    def halos(self, ranks: int) -> float:
        """Return the time of halos, and of the gather after the last divided layer, per step."""
        return super().halos(ranks) + (self.gather() if self.case.strategy == "spatial" else 0.0)

    def halo(self, layer: LayerSize, shape: tuple[int, ...]) -> float:
        """Return the values per sample that are exchanged with one neighbour, on average."""
        if not layer.kernel or len(shape) < 2:
            return 0.0
        return (layer.kernel[0] - 1) / 2 * shape[0] * prod(shape[2:])

    def gather(self) -> float:
        """Return the all-gather of the maps before the first whole layer, per step."""
        parts = self.p if self.case.strategy == "spatial" else self.p2
        last = [x for x in self.layers[:-1] if x.split][-1:]
        link, per_group = self.case.link(parts), self.batch / self.p1
        values = sum(x.items_y for x in last) / parts
        return (parts - 1) * (link.alpha + per_group * values * self.case.item * link.beta)

    def data_filter_communication(self) -> float:
        """Return the layer-wise messages of a group, and its gradients between groups."""
        inside = self.layerwise(self.p2, self.batch / self.p1)
        values = sum(x.items_w * self.share(x, self.p2) for x in self.layers)
        return self.steps * (inside + self.between(values))

    def data_spatial_communication(self) -> float:
        """Return halos, gather, and the sums of gradients inside groups and between them."""
        values = float(sum(x.items_w for x in self.layers))
        reduce = self.ring(self.p2, values, self.case.link(self.p2))
        sums = reduce + self.between(values / self.p2)
        return self.steps * (self.halos(self.p2) + self.gather() + sums)

    def between(self, values: float) -> float:
        """Return the all-reduce between groups; as many rings as ranks of a host share its card."""
        flows = min(self.p2, self.case.platform.cluster.ranks_per_host)
        inside = self.p <= self.case.platform.cluster.ranks_per_host
        return self.ring(self.p1, values, self.case.link(self.p), flows=1 if inside else flows)

    def values(self, layers: Layers, samples: float, maps: int, weights: int) -> float:  # type: ignore[override]
        """Return the bytes of outputs, two gradients of maps, and weights with their state."""
        layers = tuple(layers)

        def own(x: LayerSize, values: int) -> float:
            return values * (self.share(x, maps) if maps > 1 else 1.0)

        outputs = own(layers[0], layers[0].items_x) + sum(own(x, x.items_y) for x in layers)
        largest = max(own(x, max(x.items_x, x.items_y)) for x in layers)
        kept = sum(x.items_w * (self.share(x, weights) if weights > 1 else 1.0) for x in layers)
        return self.case.item * (ceil(samples) * (outputs + 2 * largest) + (2 + SLOTS) * kept)
