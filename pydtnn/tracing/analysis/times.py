"""Time per phase, layer and operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pydtnn.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind


@dataclass(frozen=True)
class Time:
    """The time of the activities of one name and kind.

    Attributes
    ----------
    kind : Kind
    name : str
    calls : int
        Of all ranks that were asked for.
    total : float
        Sum of the durations, in s.
    own : float
        The same without nested activities, in s.
    median : float
        Of the durations, in s.
    share : float
        Total over the duration of the trace, or of the steps, on all ranks that were asked for.
    nbytes : int
        Bytes sent, in B.
    """

    kind: Kind
    name: str
    calls: int
    total: float
    own: float
    median: float
    share: float
    nbytes: int


def phase_times(timeline: Timeline, rank: int | None = None) -> list[Time]:
    """Return the time of each phase, and of the work of the loader's threads.

    Parameters
    ----------
    timeline : Timeline
    rank : int, optional
        Default: all ranks.
    """
    return times(timeline, (Kind.PHASE, Kind.LOAD), rank)


def layer_times(timeline: Timeline, rank: int | None = None) -> list[Time]:
    """Return the time of each layer, forward and backward, in training steps."""
    return times(timeline, (Kind.FORWARD, Kind.BACKWARD), rank, in_steps=True)


def operation_times(timeline: Timeline, rank: int | None = None) -> list[Time]:
    """Return the time of each communicator call and wait, and of each kernel, in steps."""
    return times(timeline, (Kind.CALL, Kind.WAIT, Kind.KERNEL), rank, in_steps=True)


def times(
    timeline: Timeline, kinds: Sequence[Kind], rank: int | None = None, *, in_steps: bool = False
) -> list[Time]:
    """Return the time of the activities of some kinds, the longest first.

    Parameters
    ----------
    timeline : Timeline
    kinds : sequence of Kind
    rank : int, optional
        Default: all ranks.
    in_steps : bool, default False
        Only activities within training steps; shares are those of the time of the steps.
    """
    ranks = range(timeline.size) if rank is None else (rank,)
    chosen = timeline.activities[np.isin(timeline.activities["rank"], ranks)]
    whole = timeline.duration * len(ranks) or 1
    if in_steps:
        steps = timeline.steps
        parts = [chosen[chosen["rank"] == one] for one in ranks]
        parts = [
            part[steps.place(one, part["start"]) >= 0]
            for one, part in zip(ranks, parts, strict=True)
        ]
        chosen = np.concatenate(parts)
        whole = int((steps.stop - steps.start)[:, ranks].sum()) or 1
    chosen = chosen[np.isin(chosen["kind"], kinds)]
    durations = chosen["stop"] - chosen["start"]
    keys = chosen["kind"].astype("i8") << 32 | chosen["name"]
    order = np.lexsort((durations, keys))
    borders = np.flatnonzero(np.diff(keys[order], prepend=-1))
    found = []
    for group in np.split(order, borders[1:]) if len(order) else ():
        total = int(durations[group].sum())
        found.append(
            Time(
                kind=Kind(int(chosen["kind"][group[0]])),
                name=timeline.names[chosen["name"][group[0]]],
                calls=len(group),
                total=total / 1e9,
                own=int(chosen["own"][group].sum()) / 1e9,
                median=float(np.median(durations[group])) / 1e9,
                share=total / whole,
                nbytes=int(chosen["nbytes"][group].sum()),
            )
        )
    return sorted(found, key=lambda time: -time.total)


@dataclass(frozen=True)
class EpochTime:
    """The time of a phase in an epoch.

    Attributes
    ----------
    epoch : int
        -1 outside of training.
    name : str
    calls : int
        Of all ranks.
    seconds : ndarray of float, shape ``(ranks,)``
        Sum of the durations on each rank, in s.
    """

    epoch: int
    name: str
    calls: int
    seconds: np.ndarray


def epoch_times(timeline: Timeline) -> list[EpochTime]:
    """Return the time of each phase in each epoch, by epoch and in the order of the phases.

    References
    ----------
    Solórzano, A. L. V. and Schnorr, L. M., who aggregate traces of training by epoch and phase.
    """
    phases = timeline.activities[
        (timeline.activities["kind"] == Kind.PHASE) & (timeline.activities["lane"] == 0)
    ]
    found = []
    for epoch in np.unique(phases["epoch"]):
        here = phases[phases["epoch"] == epoch]
        names, first = np.unique(here["name"], return_index=True)
        for name in names[np.argsort(first)]:
            chosen = here[here["name"] == name]
            seconds = np.zeros(timeline.size)
            np.add.at(seconds, chosen["rank"], (chosen["stop"] - chosen["start"]) / 1e9)
            found.append(EpochTime(int(epoch), timeline.names[name], len(chosen), seconds))
    return found
