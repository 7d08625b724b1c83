"""Where time goes: per rank, phase, layer and operation, with bytes and rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pydtnn.tools.tracing.analysis.blocks import (
    COMMUNICATION,
    Blocks,
    Labels,
    excess_over_median,
    find_blocks,
    label,
)
from pydtnn.tools.tracing.analysis.states import find_states
from pydtnn.tools.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind


@dataclass(frozen=True)
class Slow:
    """A layer or phase in which a rank is slower than the other ranks.

    Attributes
    ----------
    rank : int
    kind : Kind
    name : str
    seconds : float
        What the rank needs per step, in s: median over the steps.
    others : float
        What the other ranks need, in s: median over these ranks and the steps.
    excess : float
        What the rank needs beyond the median of the other ranks, in s: median over the steps.
    share : float
        `excess` over the duration of a step.
    """

    rank: int
    kind: Kind
    name: str
    seconds: float
    others: float
    excess: float
    share: float


def slow_ranks(
    timeline: Timeline, labels: Labels | None = None, *, least: float = 0.02
) -> list[Slow]:
    """Return what is slower on a rank than on the others, sorted by excess, the greatest first.

    Calls, waits and messages do not count: a rank that is slow makes the others wait.

    Parameters
    ----------
    timeline : Timeline
    labels : Labels, optional
        Default: `label`.
    least : float, default 0.02
        Minimum of `Slow.share`. In four of five steps, the excess must also be at least half of
        this: a rank that the operating system interrupts now and then is not slow. With fewer than
        three steps, none is named.
    """
    labels = labels or label(timeline)
    duration = timeline.steps.duration / 1e9
    if timeline.size == 1 or len(timeline.steps) < 3:
        return []
    seconds = labels.seconds(timeline)
    excess = excess_over_median(seconds)
    typical = np.median(excess, axis=1)  # (labels, ranks)
    usual = np.quantile(excess, 0.2, axis=1, method="lower")
    named = (typical > least * duration) & (usual > least / 2 * duration)
    found = []
    for code, rank in np.argwhere(named).tolist():
        if labels.table[code] != COMMUNICATION:
            median = float(np.median(seconds[code, :, rank]))
            others = float(np.median(np.delete(seconds[code], rank, axis=1)))
            more = float(typical[code, rank])
            found.append(Slow(rank, *labels.table[code], median, others, more, more / duration))
    return sorted(found, key=lambda slow: -slow.excess)


@dataclass(frozen=True)
class Usage:
    """What the main thread of a rank did during the training steps.

    Attributes
    ----------
    rank : int
    compute : float
        Time outside of the communicator, in s.
    communication : float
        Time inside of calls and waits, without `waiting`, in s: messages in flight, the rank's
        share of sums, and the cost of the calls.
    waiting : float
        Time inside of waits before the other rank had sent its message or entered the collective
        call, in s.
    overlapped : float
        The part of `compute` while a sum or message was in flight, in s; see `find_states`.
    """

    rank: int
    compute: float
    communication: float
    waiting: float
    overlapped: float

    @property
    def total(self) -> float:
        """Time of the steps, in s."""
        return self.compute + self.communication + self.waiting


def usage(timeline: Timeline, blocks: Blocks | None = None) -> list[Usage]:
    """Return the usage of each rank; empty if no training step was recorded.

    Parameters
    ----------
    timeline : Timeline
    blocks : Blocks, optional
        Default: `find_blocks`.
    """
    found = []
    for rank, states in enumerate(find_states(timeline, blocks) if len(timeline.steps) else ()):
        _, alone, overlapped, communication, waiting = states.seconds.tolist()
        found.append(Usage(rank, alone + overlapped, communication, waiting, overlapped))
    return found


def waits(timeline: Timeline, blocks: Blocks | None = None) -> np.ndarray:
    """Return how long each rank has waited for each other during the training steps.

    Parameters
    ----------
    timeline : Timeline
    blocks : Blocks, optional
        Default: `find_blocks`.

    Returns
    -------
    ndarray of float, shape ``(ranks, ranks)``
        Element (r, q): time that rank r has waited for rank q, in s.
    """
    blocks = blocks or find_blocks(timeline)
    shares = blocks.waiting()[1] / 1e9
    found = np.zeros((timeline.size, timeline.size))
    for rank in range(timeline.size):
        here = np.flatnonzero(blocks.rank[blocks.block] == rank)
        here = here[timeline.steps.place(rank, blocks.start[blocks.block[here]]) >= 0]
        np.add.at(found[rank], blocks.peer[here], shares[here])
    return found


def traffic(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Return how much each rank has sent to each other.

    Returns
    -------
    ndarray of int, shape ``(ranks, ranks)``
        Element (r, q): bytes of the messages from rank r to rank q, in B.
    ndarray of int, shape ``(ranks, ranks)``
        Number of these messages.
    """
    messages = np.concatenate([timeline.messages.sent, timeline.messages.unmatched_sent])
    messages = messages[messages["target"] >= 0]
    shape = (timeline.size, timeline.size)
    nbytes, count = np.zeros(shape, "i8"), np.zeros(shape, "i8")
    np.add.at(nbytes, (messages["source"], messages["target"]), messages["nbytes"])
    np.add.at(count, (messages["source"], messages["target"]), 1)
    return nbytes, count


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
