"""Achieved operations and bytes per second of layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pydtnn.tracing.analysis.labels import Labels, label
from pydtnn.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind


@dataclass(frozen=True)
class Rate:
    """What a layer achieves in one direction.

    Attributes
    ----------
    name : str
    type : str
        Class of the layer.
    kind : Kind
        `FORWARD` or `BACKWARD`.
    rank : int
        The first one that has the layer, to which the numbers apply.
    seconds : float
        Time per step without calls and waits, in s: median over the steps.
    flops : int
        Operations of a step, in flop.
    nbytes : int
        Bytes that the layer reads and writes in a step, in B.
    """

    name: str
    type: str
    kind: Kind
    rank: int
    seconds: float
    flops: int
    nbytes: int

    @property
    def flops_per_second(self) -> float:
        """In flop/s."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """In B/s."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def intensity(self) -> float:
        """Operations per byte, in flop/B."""
        return self.flops / self.nbytes if self.nbytes else 0.0


@dataclass(frozen=True)
class Machine:
    """Measured limits of the machine, for the threads of one rank.

    Attributes
    ----------
    flops_per_second : float
        Of a matrix product, in flop/s.
    bytes_per_second : float
        Of a copy, read and written bytes, in B/s.
    """

    flops_per_second: float
    bytes_per_second: float

    def limit(self, rate: Rate) -> float:
        """Return the shortest time of a layer (roofline), in s."""
        return max(rate.flops / self.flops_per_second, rate.nbytes / self.bytes_per_second)


def machine(timeline: Timeline) -> Machine | None:
    """Return the limits of the machine of rank 0; None if the trace does not contain them."""
    facts = timeline.about[0].get("machine", {})
    limits = (facts.get("flops_per_second"), facts.get("bytes_per_second"))
    return Machine(*map(float, limits)) if all(limits) else None


def rates(timeline: Timeline, labels: Labels | None = None) -> list[Rate]:
    """Return the rates of the layers whose operations are in the trace, in the order of forward.

    Parameters
    ----------
    timeline : Timeline
    labels : Labels, optional
        Default: `label`.
    """
    labels = labels or label(timeline)
    seconds = np.median(labels.seconds(timeline), axis=1) if len(timeline.steps) else None
    found: dict[tuple[str, Kind], Rate] = {}
    for rank, about in enumerate(timeline.about):
        for name, facts in about.get("layers", {}).items():
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                known = (kind, name) in labels.table and (name, kind) not in found
                if seconds is None or not known:
                    continue
                flops, nbytes = (
                    int(facts[f"{kind.name.lower()}_{what}"]) for what in ("flops", "bytes")
                )
                taken = float(seconds[labels.table.index((kind, name)), rank])
                if taken and (flops or nbytes):
                    found[name, kind] = Rate(name, facts["type"], kind, rank, taken, flops, nbytes)
    return list(found.values())
