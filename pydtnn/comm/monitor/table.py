"""The table of ranks: who is late, and what each rank is doing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import TypeVar

from pydtnn.comm.monitor.links import INTERVAL_S
from pydtnn.comm.monitor.processes import Condition, condition_of
from pydtnn.comm.monitor.slots import ENDED, PID, Content, Doing, Slot
from pydtnn.utils.observer import Kind

DOWNLOAD, EXAMINATION, OTHER_GROUPS = "download", "examination", "wait for other groups"
"""Phases in which other ranks wait for one as long as it takes, the second only while it reports
progress: each part of the files that are read for the first time has a deadline."""


@dataclass
class RankRow:
    """What a rank is doing.

    Attributes
    ----------
    rank : int
    host : str
    epoch, step : int
        -1 outside of training.
    seconds : float
        For how long it has been in the same activity, in s, without the time while it was stopped.
    problem : str
        Why it does not run; empty if it can run.
    doing : str
        Its activity.
    waits : str
        The call that it is in; empty if it does not wait for other ranks.
    peer : int
        The rank that a message comes from or goes to; -1 for a collective call.
    group : str
        Group of ranks of a collective call.
    number : int
        Number of collective calls of this rank in the group, with this one.
    expired : bool
        Whether its wait has passed the deadline.
    timeout : float
        The deadline, in s; 0 for none.
    unlimited : bool
        Whether it is in a phase that may take any time.
    threads : tuple of str
        What the loader's threads do.
    """

    rank: int
    host: str
    epoch: int = -1
    step: int = -1
    seconds: float = 0.0
    problem: str = ""
    doing: str = ""
    waits: str = ""
    peer: int = -1
    group: str = ""
    number: int = 0
    expired: bool = False
    timeout: float = 0.0
    unlimited: bool = False
    threads: tuple[str, ...] = ()

    @property
    def stopped(self) -> bool:
        """Whether it cannot run until a signal continues it."""
        return self.problem.startswith("stopped")

    @classmethod
    def from_json(cls, values: object) -> RankRow:
        """Return the row with these values, of the types that `astuple` returns.

        Raises
        ------
        ValueError
            If they are others.
        """
        given = values if isinstance(values, list) else []
        types = [type(value) for value in (*astuple(cls(0, ""))[:-1], [])]
        if [type(value) for value in given] != types or {*map(type, given[-1])} - {str}:
            raise ValueError("a row has other values")
        given[-1] = tuple(given[-1])
        return cls(*given)


def describe(stack: Sequence[Doing]) -> str:
    """Describe nested activities: "in forward of conv2d0"."""
    if not stack:
        return "outside of training"
    last = stack[-1]
    if last.kind in (Kind.FORWARD, Kind.BACKWARD):
        return f"in {Kind(last.kind).name.lower()} of {last.name}"
    if last.kind == Kind.PHASE:
        return "in the loader, waits for a batch" if last.name == "data" else f"in {last.name}"
    if last.kind == Kind.LOAD:
        return "prepares a batch"
    if last.kind == Kind.KERNEL:
        return f"in the kernel {last.name}, {describe(stack[:-1])}"
    around = describe(stack[:-1]) if len(stack) > 1 else ""
    of = "" if last.bucket < 0 else f" of bucket {last.bucket}"
    return f"in {last.name}{of}{', ' * bool(around)}{around}"


class Watched:
    """The ranks of a host.

    Parameters
    ----------
    slots : sequence of Slot
    host : str
    condition : callable
        Returns the condition of a process.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        host: str,
        condition: Callable[[int], Condition] = condition_of,
    ) -> None:
        self._slots, self._host, self._condition = slots, host, condition
        self._moves = [-1] * len(slots)
        self._seconds = [0.0] * len(slots)
        self._frozen = [0.0] * len(slots)
        self._before: float | None = None

    def running(self) -> list[int]:
        """Return the places of the ranks that can run; one that waits for a disk can."""
        found = []
        for place, slot in enumerate(self._slots):
            pid = slot.words[PID]
            if pid and not self._condition(pid).frozen:
                found.append(place)
        return found

    def look(self, now: float) -> list[RankRow]:
        """Return the rows of all ranks, without those that have failed and others survive.

        Parameters
        ----------
        now : float
            The time, in s. A rank's time passes only while it can run, and while this method is
            called regularly: a job that is stopped as a whole has not waited.
        """
        passed = 0.0 if self._before is None else min(now - self._before, 2 * INTERVAL_S)
        self._before = now
        return [
            self._row(place, slot.read(), passed)
            for place, slot in enumerate(self._slots)
            if not slot.words[ENDED]
        ]

    def _row(self, place: int, content: Content, passed: float) -> RankRow:
        if not content.pid:
            return RankRow(content.rank, self._host, doing="has ended")
        condition = self._condition(content.pid)
        if content.moves != self._moves[place]:
            self._moves[place] = content.moves
            self._seconds[place] = self._frozen[place] = 0.0
        elif condition.frozen:
            self._frozen[place] += passed
        else:
            self._seconds[place] += passed
            self._frozen[place] = 0.0
        row = RankRow(
            content.rank, self._host, content.epoch, content.step, timeout=content.timeout
        )
        row.seconds = self._frozen[place] or self._seconds[place]
        row.problem, stack = condition.why, content.stack
        row.doing = describe(stack)
        waits = _waits(content)
        if content.call is not None and not condition.why:
            row.waits, row.peer = _call(content, stack), content.call.peer
            row.group, row.number = content.call.group, content.call.number
        row.threads = tuple(
            f"{name}: {describe(lane)}" for name, lane in content.lanes.items() if lane
        )
        phases = {one.name for one in stack if one.kind == Kind.PHASE}
        waits |= EXAMINATION in phases
        row.expired = waits and 0 < row.timeout <= self._seconds[place] and not condition.frozen
        examines = EXAMINATION in phases and row.seconds < row.timeout
        row.unlimited = bool(phases & {DOWNLOAD, OTHER_GROUPS}) or examines
        return row


def _waits(content: Content) -> bool:
    """Return whether a rank is in an activity with a deadline."""
    last = content.stack[-1] if content.stack else None
    in_call = last is not None and last.kind in (Kind.CALL, Kind.WAIT)
    in_loader = last is not None and last.kind == Kind.PHASE and last.name == "data"
    return content.call is not None or in_call or in_loader


def _call(content: Content, stack: Sequence[Doing]) -> str:
    """Describe the call that a rank is in, with the bucket and the layer that it belongs to."""
    assert content.call is not None
    buckets = [one.bucket for one in stack if one.bucket >= 0]
    of = f" of bucket {buckets[-1]}" if buckets else ""
    layers = [one for one in stack if one.kind in (Kind.FORWARD, Kind.BACKWARD)]
    where = f" {describe(layers[-1:])}" if layers else ""
    return f"{content.call.name}{of}{where}"


K = TypeVar("K", bound=Hashable)


def awaited_ranks(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return the ranks that the others wait for; none if all wait for each other.

    These are ranks that cannot run, otherwise those that do not wait for another rank, otherwise
    those that have made fewer calls in a group than others that wait there.
    """
    stopped = [row for row in rows if row.problem]
    busy = [row for row in rows if not row.waits]
    most: dict[str, int] = {}
    for row in rows:
        most[row.group] = max(row.number, most.get(row.group, 0))
    behind = [row for row in rows if 0 < row.number < most[row.group]]
    found = stopped or busy or behind
    return found if len(found) < len(rows) or stopped else []


def sentence(rows: Sequence[RankRow]) -> str:
    """Return who is late and what the others wait for, in one sentence.

    Examples
    --------
    >>> rows = [RankRow(0, "a", waits="barrier"), RankRow(1, "a", waits="barrier")]
    >>> sentence([*rows, RankRow(2, "a", doing="in the loader", seconds=41)])
    'rank 2: in the loader since 41 s; ranks 0-1 wait in barrier'
    """
    found = awaited_ranks(rows)
    parts = [f"{names(same)}: {text}" for text, same in _alike(found, _late)]
    others = [row for row in rows if row not in found and row.waits]
    for text, same in _alike(others, lambda row: row.waits):
        parts.append(f"{names(same)} wait{'s' * (len(same) == 1)} in {text}")
    return "; ".join(parts) or "no rank waits for another"


def table(rows: Sequence[RankRow]) -> str:
    """Return a table with a line for each rank; ranks that do the same share a line."""
    several = len({row.host for row in rows}) > 1
    lines = [("rank", "host", "epoch", "step", "for", "doing")]
    for (text, position, host), same in _alike(rows, lambda row: (_doing(row), _at(row), row.host)):
        seconds = max(row.seconds for row in same)
        numbers = ranges(row.rank for row in same)
        lines.append((numbers, host, *position, f"{seconds:.1f} s", text))
    shown = [line if several else (line[0], *line[2:]) for line in lines]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    padded = (
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in shown
    )
    return "".join("  ".join(line).rstrip() + "\n" for line in padded)


def names(rows: Sequence[RankRow]) -> str:
    """Return "rank 1" or "ranks 0-2, 5"."""
    return f"rank{'s' * (len(rows) > 1)} {ranges(row.rank for row in rows)}"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers with runs of consecutive ones in short.

    >>> ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _late(row: RankRow) -> str:
    doing = ", ".join(filter(None, [row.problem, row.doing, *row.threads]))
    return f"{doing} since {row.seconds:.0f} s"


def _doing(row: RankRow) -> str:
    waits = ""
    if row.waits:
        peer = "" if row.peer < 0 else f" with rank {row.peer}"
        waits = f"waits in {row.waits}{peer}"
    return ", ".join(filter(None, [row.problem, waits or row.doing, *row.threads]))


def _at(row: RankRow) -> tuple[str, str]:
    return ("-", "-") if row.epoch < 0 else (str(row.epoch), str(row.step))


def _alike(rows: Iterable[RankRow], key: Callable[[RankRow], K]) -> list[tuple[K, list[RankRow]]]:
    """Group rows by a key, in the order of their first."""
    groups: dict[K, list[RankRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())
