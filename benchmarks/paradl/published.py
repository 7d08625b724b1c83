"""Formulas of ParaDL's Table III, as published.

D samples per epoch, B samples per step of all ranks, p ranks, G layers, |x|, |y|, |w| values of
input, output and weights of a layer, FW, BW seconds per sample, WU seconds per step, delta bytes
per value, alpha latency, beta seconds per byte. D / B is rounded up to whole steps.

References
----------
Kahira et al., "An oracle for guiding large-scale model/hybrid parallel training of convolutional
neural networks", 2021, table III.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from math import prod

from benchmarks.paradl.case import Case, Link
from benchmarks.paradl.layers import LayerSize
from pydtnn.model.partition.stages import smallest_largest

Layers = tuple[LayerSize, ...]


class Published:
    """Terms of the table for one case.

    Layers that are not divided (`LayerSize.split`) are computed on every rank, with all weights.

    Parameters
    ----------
    case : Case
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.layers = case.network.layers
        self.p, self.batch, self.steps = case.ranks, case.batch, case.steps
        self.p1, self.p2 = case.groups, case.parts
        self.samples = case.network.samples

    # -- computation, in s per epoch

    def compute(self) -> float:
        """Return the time of computation."""
        rules: dict[str, Callable[[], float]] = {
            "serial": lambda: self.passes(1, 1) + self.steps * self.update(1),
            "data": lambda: self.passes(self.p, 1) + self.steps * self.update(1),
            "spatial": lambda: self.passes(1, self.p) + self.steps * self.update(1),
            "pipeline": self.pipeline_compute,
            "filter": lambda: self.passes(1, self.p) + self.steps * self.update(self.p),
            "channel": lambda: self.passes(1, self.p) + self.steps * self.update(self.p),
            "data+filter": lambda: (
                self.passes(self.p1, self.p2) + self.steps * self.update(self.p2)
            ),
            "data+spatial": lambda: self.passes(self.p1, self.p2) + self.steps * self.update(1),
        }
        return rules[self.case.strategy]()

    def passes(self, groups: int, parts: int) -> float:
        """Return (D / groups) sum (FW + BW), divided by `parts` where layers are divided."""
        own = sum((x.forward + x.backward) * self.share(x, parts) for x in self.layers)
        return self.samples / groups * own

    def share(self, layer: LayerSize, parts: int) -> float:
        """Return the part of a layer that a rank computes."""
        return 1 / parts if layer.split else 1.0

    def update(self, parts: int) -> float:
        """Return the time of the update of a rank's weights, per step."""
        return sum(x.update / (parts if x.split else 1) for x in self.layers)

    def stages(self) -> list[Layers]:
        """Return the layers of each rank of a pipeline, so that the longest is the shortest."""
        layers, count = self.layers, min(self.p, len(self.layers))
        places = [*range(len(layers) + 1)]
        work = [0.0]
        for x in layers:
            work.append(work[-1] + x.forward + x.backward)
        if not work[-1]:  # without times, stages have about equally many layers
            work = [float(i) for i in places]
        cuts = smallest_largest(places, count, lambda start, stop: work[stop] - work[start])
        bounds = [0, *cuts, len(layers)]
        return [layers[a:b] for a, b in pairwise(bounds)]

    def pipeline_compute(self) -> float:
        """Return D (p + S - 1) / S (max FW + max BW + max WU) over the stages."""
        stages, s = self.stages(), self.case.segments
        rounds = self.samples * (self.p + s - 1) / s
        longest = (max(_total(x, part) for x in stages) for part in ("forward", "backward"))
        return rounds * sum(longest) + self.pipeline_update(rounds)

    def pipeline_update(self, rounds: float) -> float:
        """Return the time of updates; the published term has the rounds of a pipeline."""
        return rounds * max(_total(x, "update") for x in self.stages())

    # -- communication, in s per epoch

    def communication(self) -> float:
        """Return the time of communication."""
        rules: dict[str, Callable[[], float]] = {
            "serial": lambda: 0.0,
            "data": lambda: self.steps * self.gradients(self.p),
            "spatial": lambda: self.steps * (self.gradients(self.p) + self.halos(self.p)),
            "pipeline": self.pipeline_communication,
            "filter": lambda: self.steps * self.layerwise(self.p, self.batch),
            "channel": lambda: self.steps * self.layerwise(self.p, self.batch),
            "data+filter": self.data_filter_communication,
            "data+spatial": self.data_spatial_communication,
        }
        return rules[self.case.strategy]()

    def ring(self, ranks: int, values: float, link: Link, flows: float = 1.0) -> float:
        """Return 2 (p - 1) (alpha + values / p delta beta): an all-reduce on a ring."""
        own = self.case.item * link.beta * flows
        return 2 * (ranks - 1) * (link.alpha + values / ranks * own)

    def gradients(self, ranks: int) -> float:
        """Return the time of the all-reduce of all gradients, per step."""
        return self.ring(ranks, _weights(self.layers), self.case.link(self.p))

    def layerwise(self, ranks: int, samples: float) -> float:
        """Return 3 (p - 1) sum over l < G of (alpha + B |y| / p delta beta), per step."""
        link = self.case.link(ranks)
        per_item = self.case.item * link.beta
        inner = [x for x in self.layers[:-1] if x.split]
        return (
            3
            * (ranks - 1)
            * sum(link.alpha + samples * x.items_y / ranks * per_item for x in inner)
        )

    def halos(self, ranks: int) -> float:
        """Return 2 sum of (2 alpha + B (halo(x) + halo(dy)) delta beta), per step."""
        if ranks == 1:
            return 0.0
        link, per_group = self.case.link(ranks), self.batch / self.p1
        cut = (x for x in self.layers if x.split and self.has_halo(x))
        return 2 * sum(
            2 * link.alpha
            + per_group * (self.halo(x, x.x) + self.halo(x, x.y)) * self.case.item * link.beta
            for x in cut
        )

    def has_halo(self, layer: LayerSize) -> bool:
        """Return whether a layer's windows read rows of other ranks."""
        return self.halo(layer, layer.x) > 0

    def halo(self, layer: LayerSize, shape: tuple[int, ...]) -> float:
        """Return the values per sample that are exchanged with one neighbour."""
        return layer.halo(shape)

    def data_filter_communication(self) -> float:
        """Return the layer-wise messages of a group, and the gradients between groups."""
        inside = self.layerwise(self.p2, self.batch / self.p1)
        link = self.case.link(self.p)
        per_item = self.case.item * link.beta
        values = _weights(self.layers) / self.p
        return self.steps * (inside + 2 * (self.p1 - 1) * (link.alpha + values * per_item))

    def data_spatial_communication(self) -> float:
        """Return halos and gather of a group, the reduction inside it, and that between groups."""
        within, weights = self.case.link(self.p2), _weights(self.layers)
        reduce = self.ring(self.p2, weights, within)
        between = self.ring(self.p1, weights, self.case.link(self.p))
        return self.steps * (self.halos(self.p2) + 2 * self.gather() + reduce + between)

    def gather(self) -> float:
        """Return the time to gather the output of the last layer that is divided, per step."""
        last = [x for x in self.layers[:-1] if x.split][-1:]
        link, per_group = self.case.link(self.p2), self.batch / self.p1
        return sum(
            (self.p2 - 1)
            * (link.alpha + per_group * x.items_y / self.p2 * self.case.item * link.beta)
            for x in last
        )

    def pipeline_communication(self) -> float:
        """Return 2 D (p + S - 2) / B max (alpha + B / S |y| delta beta)."""
        s, link = self.case.segments, self.case.link(self.p)
        inner = self.stages()[:-1]
        if not inner:
            return 0.0
        per_item = self.case.item * link.beta
        longest = max(link.alpha + self.batch / s * x[-1].items_y * per_item for x in inner)
        return 2 * self.steps * (self.p + s - 2) * longest

    # -- memory of a rank, in B

    def memory(self) -> float:
        """Return 2 delta sum (samples (|x| + |y|) + |w|), of the parts of a rank."""
        b, p, p1, p2 = self.batch, self.p, self.p1, self.p2
        rules: dict[str, Callable[[], float]] = {
            "serial": lambda: self.values(self.layers, b, 1, 1),
            "data": lambda: self.values(self.layers, b / p, 1, 1),
            "spatial": lambda: self.values(self.layers, b, p, 1),
            "pipeline": lambda: max(self.values(x, b, 1, 1) for x in self.stages()),
            "filter": lambda: self.values(self.layers, b, 1, p),
            "channel": lambda: self.values(self.layers, b, 1, p),
            "data+filter": lambda: self.values(self.layers, b / p1, 1, p2),
            "data+spatial": lambda: self.values(self.layers, b / p1, p2, 1),
        }
        return rules[self.case.strategy]()

    def values(self, layers: Iterable[LayerSize], samples: float, maps: int, weights: int) -> float:
        """Return the bytes of layers with maps and weights that are divided."""
        found = 0.0
        for x in layers:
            if x.in_memory:
                found += samples * (x.items_x + x.items_y) / (maps if x.split else 1)
                found += x.items_w / (weights if x.split else 1)
        return 2 * self.case.item * found

    # -- limits

    def limit(self) -> tuple[int, str]:
        """Return the maximum number of ranks, and what limits it."""
        divided = [x for x in self.layers if x.split]
        filters = min((x.filters for x in divided if x.filters), default=1)
        channels = min(
            (x.channels for x in divided if x.channels and x is not self.layers[0]), default=1
        )
        maps = min((prod(x.y[1:]) for x in divided if len(x.y) > 1), default=1)
        rows = min((min(x.y[1:]) for x in divided if len(x.y) > 1), default=1)
        b = self.batch
        rules = {
            "serial": (1, "one rank"),
            "data": (b, f"a sample per rank, of {b}"),
            "spatial": (maps, f"a value of the smallest map per rank, of {maps}"),
            "pipeline": (len(self.layers), f"a layer per rank, of {len(self.layers)}"),
            "filter": (filters, f"a filter per rank, of {filters}"),
            "channel": (channels, f"a channel per rank, of {channels}"),
            "data+filter": (b * filters, f"{b} samples and {filters} filters"),
            "data+spatial": (b * rows, f"{b} samples and {rows} rows"),
        }
        most, why = rules[self.case.strategy]
        own = {"data+filter": filters, "data+spatial": rows}.get(self.case.strategy, self.p2)
        if "+" in self.case.strategy and (self.p1 > b or self.p2 > own):
            return min(most, min(b, self.p1) * min(own, self.p2)), why
        return most, why


def _weights(layers: Iterable[LayerSize]) -> float:
    return float(sum(x.items_w for x in layers))


def _total(layers: Iterable[LayerSize], part: str) -> float:
    return float(sum(getattr(x, part) for x in layers))
