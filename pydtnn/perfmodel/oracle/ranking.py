"""Projections of many strategies, ranked by the time of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, log
from typing import Any

from pydtnn.perfmodel.oracle.strategies import KINDS, Variants, strategies
from pydtnn.perfmodel.prediction import Prediction
from pydtnn.perfmodel.projection import Projector
from pydtnn.perfmodel.workload import Workload

TERMS = (
    *("forward", "backward", "recomputed", "other", "update", "layers_exposed"),
    *("gradients_exposed", "idle", "busy"),
)
"""Times of a step in a table's row: attributes of `StepTime`."""


@dataclass(frozen=True)
class Entry:
    """A strategy and its prediction.

    Attributes
    ----------
    work : Workload
    projection : Prediction or None
        None if the strategy is not possible.
    reason : str
        Why it is not possible, or what does not fit; empty if it is.
    efficiency : float
        Time of one rank for the same samples, divided by the ranks and by the time of the strategy.
    node_hours : float
        Hosts times hours of an epoch.
    """

    work: Workload
    projection: Prediction | None
    reason: str = ""
    efficiency: float = 0.0
    node_hours: float = 0.0

    @property
    def possible(self) -> bool:
        """Whether the strategy fits the network, the batch and the memory."""
        return not self.reason

    @property
    def bottleneck(self) -> str:
        """The part of a step that takes the most time; empty without a projection."""
        return "" if self.projection is None else self.projection.bottleneck

    def to_json(self) -> dict[str, Any]:
        """Return numbers in SI units and words, as one row of a table."""
        row: dict[str, Any] = {
            "ranks": self.work.ranks,
            "strategy": self.work.strategy,
            "parallel": self.work.parallel,
            "possible": self.possible,
            "reason": self.reason,
        }
        one = self.projection
        if one is None:
            return row
        parts = {f"memory_{name}": size for name, size in asdict(one.memory).items()}
        return row | {
            "samples_per_rank": one.work.samples_per_rank,
            "global_batch": one.work.batch,
            "seconds_per_step": one.seconds,
            "seconds_per_epoch": one.epoch,
            "samples_per_second": one.throughput,
            **{name: getattr(one.step, name) for name in TERMS},
            "loader": one.loader,
            "checkpoint": one.checkpoint,
            "memory": one.memory.total,
            **parts,
            "efficiency": self.efficiency,
            "node_hours": self.node_hours,
            "bottleneck": self.bottleneck,
        }


class Oracle:
    """Ranks the strategies of a run on a platform.

    Parameters
    ----------
    projector : Projector
    per_rank : int, optional
        Samples of each rank: weak scaling, with a global batch of that many times the ranks. By
        default the global batch of the run: strong scaling.
    """

    def __init__(self, projector: Projector, per_rank: int | None = None) -> None:
        self.projector, self.per_rank = projector, per_rank
        self._serial: dict[int, float] = {}

    def serial_rate(self, batch: int) -> float:
        """Return the samples per second of one rank, whatever memory it needs."""
        if batch not in self._serial:
            work = replace(self.projector.work, axes={}, batch=batch)
            self._serial[batch] = self.projector.project(work).throughput
        return self._serial[batch]

    def _scaled(self, work: Workload) -> Workload:
        return work if self.per_rank is None else replace(work, batch=self.per_rank * work.ranks)

    def entry(self, work: Workload) -> Entry:
        """Predict training; the reason says why it is not possible, if so."""
        work, platform = self._scaled(work), self.projector.platform
        try:
            one = self.projector.project(work)
        except ValueError as error:
            return Entry(work, None, str(error))
        reason = ""
        if one.memory.total > platform.cluster.memory_per_rank:
            reason = (
                f"{one.memory.largest}: a rank needs {one.memory.total / 1e9:.3g} GB of "
                f"{platform.cluster.memory_per_rank / 1e9:.3g} GB"
            )
        hosts = ceil(work.ranks / platform.cluster.ranks_per_host)
        return Entry(
            work,
            one,
            reason,
            efficiency=one.throughput / work.ranks / self.serial_rate(self.per_rank or work.batch),
            node_hours=hosts * one.epoch / 3600,
        )

    def rank(self, found: Iterable[Workload]) -> list[Entry]:
        """Predict runs; possible ones first, in the order of the time of an epoch."""
        return sort_entries(map(self.entry, found))

    def sweep(
        self,
        ranks: Sequence[int],
        kinds: Sequence[str] = KINDS,
        variants: Variants | None = None,
        *,
        most: int = 1,
    ) -> dict[int, list[Entry]]:
        """Rank all strategies for each of several numbers of ranks; see `strategies`."""
        work = self.projector.work
        return {n: self.rank(strategies(work, n, kinds, variants, most=most)) for n in ranks}


def sort_entries(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in the order of the time of an epoch, those that are not possible last.

    Of entries that differ by less than about 1 %, those with fewer variants come first.
    """

    def key(entry: Entry) -> tuple[bool, bool, float, bool, float]:
        one, work = entry.projection, entry.work
        if one is None:
            return not entry.possible, True, 0.0, False, 0.0
        variant = work.recompute is not None or work.scheme != "allreduce"
        times = round(100 * log(one.epoch)), variant or bool(work.compress), one.epoch
        return not entry.possible, False, *times

    return sorted(entries, key=key)


def best(entries: Sequence[Entry]) -> Entry | None:
    """Return the fastest entry that is possible."""
    return next((entry for entry in entries if entry.possible), None)
