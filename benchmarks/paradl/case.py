"""What a projection is made for: network, platform, ranks and batch; and its result."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from benchmarks.paradl.layers import LayerList
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.utils.names import unknown
from pydtnn.utils.validate import check_int

STRATEGIES = (
    "serial",
    "data",
    "spatial",
    "pipeline",
    "filter",
    "channel",
    "data+filter",
    "data+spatial",
)
"""Rows of Table III, and the hybrid of the published tool."""

ALIASES = {
    "o": "serial",
    "d": "data",
    "s": "spatial",
    "p": "pipeline",
    "layer": "pipeline",
    "f": "filter",
    "c": "channel",
    "df": "data+filter",
    "ds": "data+spatial",
}
"""Short names, as in the published tool."""


class Link(NamedTuple):
    """Latency in s and time per byte in s/B."""

    alpha: float
    beta: float


@dataclass(frozen=True)
class Case:
    """A strategy on a number of ranks.

    Parameters
    ----------
    network : LayerList
    platform : Platform
    strategy : str
        One of `STRATEGIES` or `ALIASES`.
    ranks : int
    batch : int
        Samples of all ranks per step.
    groups : int, default 1
        For hybrids, groups of ranks with other samples; each cuts the network over
        ``ranks / groups``.
    segments : int, default 4
        Parts of a batch in a pipeline.
    item : int, default 4
        Bytes of a value.

    Raises
    ------
    ValueError
        If the strategy is unknown, or the numbers do not fit.
    """

    network: LayerList
    platform: Platform
    strategy: str
    ranks: int
    batch: int
    groups: int = 1
    segments: int = 4
    item: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", ALIASES.get(self.strategy, self.strategy))
        if self.strategy not in STRATEGIES:
            choices = [*STRATEGIES, *ALIASES]
            raise ValueError(f"paradl: {unknown('strategy', self.strategy, choices)}")
        for name in ("ranks", "batch", "groups", "segments", "item"):
            check_int("paradl", name, getattr(self, name), at_least=1, at_most=2**40)
        if self.ranks % self.groups:
            raise ValueError(
                f"paradl: groups must divide the ranks, {self.ranks}, got {self.groups}; use "
                "another number"
            )

    @property
    def parts(self) -> int:
        """Ranks of a group of a hybrid: p2."""
        return self.ranks // self.groups

    @property
    def steps(self) -> int:
        """Steps of an epoch, the last of which may be smaller."""
        return ceil(self.network.samples / self.batch)

    def link(self, ranks: int) -> Link:
        """Return latency and time per byte between the ranks of a group, by its size."""
        own = self.platform.messages.inside
        if ranks > self.platform.cluster.ranks_per_host:
            own = self.platform.between(ranks)
        return Link(own.latency, 1 / own.bandwidth)


@dataclass(frozen=True)
class Projection:
    """Result for a case.

    Attributes
    ----------
    case : Case
    formulas : str
        Which formulas: a key of `benchmarks.paradl.projection.FORMULAS`.
    compute, communication : float
        In s per epoch.
    memory : float
        Of a rank, in B.
    limit : int
        Maximum number of ranks of the strategy.
    limited_by : str
        What the limit is.
    """

    case: Case
    formulas: str
    compute: float
    communication: float
    memory: float
    limit: int
    limited_by: str

    @property
    def seconds(self) -> float:
        """Time of an epoch, in s."""
        return self.compute + self.communication

    @property
    def cost(self) -> int:
        """Rank minutes of an epoch: ranks times minutes, rounded up."""
        return self.case.ranks * ceil(self.seconds / 60)

    @property
    def problem(self) -> str:
        """Why the case is not possible; empty if it is."""
        capacity = self.case.platform.cluster.memory_per_rank
        if self.case.ranks > self.limit:
            return f"at most {self.limit} ranks: {self.limited_by}"
        if self.memory > capacity:
            return f"memory {self.memory / 1e9:.3g} GB, more than {capacity / 1e9:.3g} GB"
        return ""
