"""Analysis of flight records: the operation at which the ranks of a run have parted.

Flight records are the newest activities and messages of each rank, written when the run fails or on
request (`pydtnn.comm.monitor.flight`). The collective calls of a group of ranks are numbered; a
rank that has made another one than the others, or fewer, is found by their numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydtnn.comm.monitor.slots import FLIGHT
from pydtnn.comm.monitor.table import RankRow, ranges, table
from pydtnn.tools.tracing.records import RankTrace, read_traces
from pydtnn.utils.observer import Kind

EQUAL_BYTES = ("allreduce", "iallreduce", "broadcast", "reduce_scatter")
"""Collective calls for which the same bytes are counted on all ranks."""


@dataclass(frozen=True)
class FlightCall:
    """A collective call of a rank.

    Attributes
    ----------
    name, group : str
    number : int
        Number of collective calls of the rank in the group, with this one.
    nbytes, bucket : int
        Bytes that are counted for it, and the bucket or -1.
    """

    name: str
    group: str
    number: int
    nbytes: int = 0
    bucket: int = -1

    def __str__(self) -> str:
        bucket = f" of bucket {self.bucket}" if self.bucket >= 0 else ""
        nbytes = f", {self.nbytes:,} B" if self.nbytes else ""
        return f"{self.name}{bucket} (call {self.number} of group {self.group}{nbytes})"

    @property
    def kind(self) -> tuple[str, int]:
        """What is equal on all ranks."""
        return self.name, self.nbytes if self.name in EQUAL_BYTES else 0


@dataclass
class Flight:
    """The flight record of a rank.

    Attributes
    ----------
    row : Row
        What the rank was doing.
    calls : dict of str to dict of int to Call
        Its newest collective calls, by group and number.
    waiting : dict or None
        The call of MPI that it was in: "name", "group", "number", "peer".
    waits : str
        The call or wait that it was in; empty if it did not wait.
    place : (str, int)
        The group of that call, and the number of calls in the group.
    trace : RankTrace
    """

    row: RankRow
    calls: Mapping[str, Mapping[int, FlightCall]]
    waiting: Mapping[str, Any] | None
    waits: str
    place: tuple[str, int]
    trace: RankTrace

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self.row.rank

    @property
    def state(self) -> str:
        """What the rank was doing, with its place in training and for how long."""
        row = self.row
        text = ", ".join(filter(None, [row.problem, self.waits or row.doing]))
        place = f" (epoch {row.epoch}, step {row.step})" if row.epoch >= 0 else ""
        return f"{text}{place} since {row.seconds:.1f} s"

    def last(self, group: str) -> int:
        """Return the number of its collective calls in a group; 0 if none is recorded."""
        return max(self.calls.get(group, ()), default=0)


def read_flights(folder: str | Path) -> list[Flight]:
    """Read the flight records of a run, in the order of the ranks; those of lost hosts are missing.

    Parameters
    ----------
    folder : str or Path
        Of the run, or of the records.

    Raises
    ------
    ValueError
        If there are none, or a file is damaged.
    """
    folder = Path(folder)
    if (folder / FLIGHT).is_dir():
        folder = folder / FLIGHT
    elif not [*folder.glob("rank-*.npz")]:
        raise ValueError(
            f"trace: {folder} has no flight records; they are written when a run waits too long or "
            "fails, and by kill -USR1"
        )
    return [_read(trace) for trace in read_traces(folder, complete=False)]


def _read(trace: RankTrace) -> Flight:
    about = trace.about.get("flight")
    if not isinstance(about, dict):
        raise ValueError(
            "trace: expected flight records, got a trace; use python -m pydtnn trace summary"
        )
    try:
        texts = (str(about[name]) for name in ("problem", "doing"))
        row = RankRow(trace.rank, str(trace.about["host"]), int(about["epoch"]), int(about["step"]))
        row.problem, row.doing = texts
        row.seconds = float(about["seconds"])
        waiting = about["call"]
        if waiting is not None:
            waiting = {name: waiting[name] for name in ("name", "group", "number", "peer")}
        count = int(about["in progress"])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"trace: the flight record of rank {trace.rank} is damaged") from error
    calls: defaultdict[str, dict[int, FlightCall]] = defaultdict(dict)
    for one in trace.records[(trace.records["kind"] == Kind.CALL) & (trace.records["tag"] > 0)]:
        group, number = trace.names[one["group"]], int(one["tag"])
        calls[group][number] = FlightCall(
            trace.names[one["name"]], group, number, int(one["nbytes"]), int(one["bucket"])
        )
    waits, group = _wait(trace, count, waiting)
    return Flight(row, calls, waiting, waits, (group, max(calls.get(group, ()), default=0)), trace)


def _wait(trace: RankTrace, count: int, waiting: Mapping[str, Any] | None) -> tuple[str, str]:
    """Describe the call or wait that a rank is in, and for what; return its group as well."""
    open_ones = trace.records[len(trace.records) - count :]
    chosen = open_ones[(open_ones["lane"] == 0) & (open_ones["kind"] >= Kind.CALL)]
    chosen = chosen[chosen["kind"] <= Kind.WAIT]
    peer = waiting["peer"] if waiting is not None else -1
    of = f" with rank {peer}" if peer >= 0 else ""
    if not len(chosen):
        return ("", "") if waiting is None else (f"waits in {waiting['name']}{of}", "")
    one = chosen[0]  # the innermost: records in progress are in the order of their ends
    buckets = [bucket for bucket in open_ones["bucket"].tolist() if bucket >= 0]
    bucket = f" of bucket {buckets[0]}" if buckets else ""
    group = trace.names[one["group"]] if one["group"] >= 0 else "?"
    return f"waits in {trace.names[one['name']]}{bucket}{of} of group {group}", group


@dataclass(frozen=True)
class Parting:
    """Where the ranks of a run have parted.

    Attributes
    ----------
    ranks : tuple of int
        The ranks that are late or differ; empty if none is known.
    operation : str
        The operation that they have not made, or made in another way.
    text : str
        Both in one sentence.
    """

    ranks: tuple[int, ...]
    operation: str
    text: str


def find_parting(flights: Sequence[Flight]) -> Parting:
    """Return the operation at which the ranks have parted.

    In this order: a collective call that ranks have made in different ways; ranks that cannot run,
    or compute, while others wait, with the first call that they have not made; ranks that wait
    elsewhere than most others, or for a message.
    """
    parting = _unequal(flights)
    if parting is not None:
        return parting
    size = int(flights[0].trace.about["size"])
    missing = sorted({*range(size)} - {flight.rank for flight in flights})
    waiting = [flight for flight in flights if flight.waits and not flight.row.problem]
    others = [flight for flight in flights if flight not in waiting]
    stopped = [flight for flight in others if flight.row.problem]
    if not waiting and not stopped and not missing:
        return Parting((), "", "no rank waits for another")
    places = Counter(flight.place for flight in waiting)
    usual = places.most_common(1)[0][0] if places else ("", 0)
    found = stopped or others or [flight for flight in waiting if flight.place != usual] or waiting
    if missing:
        operation = next((flight.waits for flight in waiting), "")
        text = f"{_names(missing)}: no record, as {'their' if missing[1:] else 'its'} host was lost"
        return Parting(tuple(missing), operation, f"{text}; others: {operation or 'not waiting'}")
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for flight in found:
        text = f"{flight.state}{_missing(flight, flights, usual[0])}{_partner(flight, flights)}"
        alike[text].append(flight.rank)
    missed = next((call for one in found if (call := _missed(one, flights, usual[0]))), None)
    operation = str(missed) if missed is not None else found[0].waits or found[0].row.doing
    text = "; ".join(f"{_names(ranks)}: {text}" for text, ranks in alike.items())
    return Parting(tuple(one.rank for one in found), operation, text)


def _unequal(flights: Sequence[Flight]) -> Parting | None:
    """Return the first collective call that ranks have made in different ways."""
    for group in sorted({group for flight in flights for group in flight.calls}):
        own = [flight for flight in flights if group in flight.calls]
        first = max(min(flight.calls[group]) for flight in own)
        for number in range(first, max(flight.last(group) for flight in own) + 1):
            made = {f.rank: f.calls[group][number] for f in own if number in f.calls[group]}
            kinds = Counter(call.kind for call in made.values())
            if len(kinds) < 2:
                continue
            usual = kinds.most_common(1)[0][0]
            right = [rank for rank, call in made.items() if call.kind == usual]
            wrong = tuple(rank for rank in made if rank not in right)
            call = made[right[0]]
            others = ", ".join(f"rank {rank} {made[rank]}" for rank in wrong)
            text = f"{_names(right)} {_have(right)} made {call}, but {others}"
            return Parting(wrong, str(call), text)
    return None


def _missed(flight: Flight, flights: Sequence[Flight], usual: str) -> FlightCall | None:
    """Return the first call that a rank has not made and others have; None if there is none.

    Parameters
    ----------
    flight : Flight
    flights : sequence of Flight
        Of all ranks.
    usual : str
        The group in which most ranks wait, which precedes other groups.
    """
    for group in (usual, *flight.calls):
        number = flight.last(group) + 1
        for other in flights:
            if number in other.calls.get(group, ()):
                return other.calls[group][number]
    return None


def _missing(flight: Flight, flights: Sequence[Flight], usual: str) -> str:
    """Describe the call that a rank has not made."""
    call = _missed(flight, flights, usual)
    if call is None:
        return ""
    made = [other.rank for other in flights if other.last(call.group) >= call.number]
    return f"; not made: {call}, which {_names(made)} {_have(made)}"


def _partner(flight: Flight, flights: Sequence[Flight]) -> str:
    """Describe the rank that a message is to come from or go to."""
    peer = flight.waiting["peer"] if flight.waiting is not None else -1
    return next((f"; rank {peer}: {one.state}" for one in flights if one.rank == peer), "")


def describe_flights(flights: Sequence[Flight], last: int = 5) -> Iterator[str]:
    """Yield the lines of a report.

    Parameters
    ----------
    flights : sequence of Flight
    last : int
        Number of records that are shown of each rank that is late.
    """
    about = flights[0].trace.about["flight"]
    parting = find_parting(flights)
    yield parting.text
    yield f"written: {about['why']}"
    yield from table(
        [replace(one.row, waits=one.waits.removeprefix("waits in ")) for one in flights]
    ).splitlines()
    for flight in flights:
        if flight.rank in parting.ranks:
            yield f"last activities of rank {flight.rank}:"
            yield from _last(flight.trace, last)


def _last(trace: RankTrace, count: int) -> Iterator[str]:
    """Yield lines with the newest records of a rank."""
    end = int((trace.records["start"] + trace.records["duration"]).max(initial=0))
    in_progress = trace.about["flight"]["in progress"]
    first = max(len(trace.records) - count - in_progress, 0)
    for at, one in enumerate(trace.records[first:], first):
        kind = Kind(one["kind"]).name.lower()
        name = trace.names[one["name"]]
        if at >= len(trace.records) - in_progress:
            took = "in progress"
        else:
            took = f"{one['duration'] / 1e6:.3f} ms"
        more = f" with rank {one['peer']}, tag {one['tag']}" if one["peer"] >= 0 else ""
        more += f", call {one['tag']}" if one["kind"] == Kind.CALL and one["tag"] > 0 else ""
        more += f", bucket {one['bucket']}" if one["bucket"] >= 0 else ""
        more += f", {one['nbytes']:,} B" if one["nbytes"] else ""
        yield f"  {(one['start'] - end) / 1e6:12.3f} ms  {kind} {name}{more}: {took}"


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def _have(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"
