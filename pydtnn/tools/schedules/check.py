"""Verification that a schedule gives every rank the sum; errors specify the round and the ranks.

Nothing is sent: the rounds of all ranks are carried out together on symbols. A proof holds for
arrays of any length, because parts are exact fractions; and for ranks and messages of any speed,
because the only assumption is that messages between two ranks keep their order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from typing import TypeVar

from pydtnn.comm.schedules import Algorithm, rounds
from pydtnn.comm.schedules.steps import ALL, MessageStep, Part, Round
from pydtnn.tools.schedules.timeline import (
    MatchedPlan,
    Plan,
    PlanMessage,
    RoundEvent,
    ScheduleError,
    show,
    timeline,
)

V = TypeVar("V")
"""Type of the symbolic value of a chunk."""


def carry_out(
    done: MatchedPlan, values: list[list[V]], add: Callable[[PlanMessage, Part, V, V], V]
) -> Iterator[RoundEvent]:
    """Carry out a schedule in place.

    Parameters
    ----------
    done : Timeline
        The schedule.
    values : list of lists
        For each rank, the symbolic value of each of the `MatchedPlan.chunks`.
    add : callable
        Returns a sum: ``add(message, chunk, existing value, received value)``.

    Yields
    ------
    Event
        Each beginning and end of a round, after its effect on the values.
    """
    pieces = done.chunks
    first = {piece.start: i for i, piece in enumerate(pieces)} | {ALL.stop: len(pieces)}
    sent, received = defaultdict(list), defaultdict(list)
    for message in done.messages:
        sent[message.sender, message.sent].append(message)
        received[message.receiver, message.received].append(message)
    travelling: dict[PlanMessage, list[V]] = {}
    for event in done.events:
        mine, place = values[event.rank], (event.rank, event.round)
        if event.begins:
            for message in sent[place]:
                travelling[message] = mine[first[message.part.start] : first[message.part.stop]]
        else:
            for message in received[place]:
                for i, value in enumerate(travelling[message], first[message.part.start]):
                    summed = message.op == "sum"
                    mine[i] = add(message, pieces[i], mine[i], value) if summed else value
        yield event


__all__ = ["ScheduleError", "associations", "check", "plan"]


def check(schedule: str | Algorithm | Plan, hosts: int | Sequence[Hashable] = ()) -> MatchedPlan:
    """Prove that a schedule is an allreduce, for one number of ranks.

    Every step specifies another rank of the group and a part of the array; every send matches a
    receive of the same part; there is no deadlock; no part is overwritten while it is sent, or
    written by two messages at once; and every element is finally, on every rank, the sum that
    contains the contribution of every rank exactly once.

    Parameters
    ----------
    schedule : str, Algorithm or sequence of sequences of Round
        A name of `SCHEDULES`, an algorithm, or the rounds of all ranks.
    hosts : int or sequence of hashable
        Number of ranks, or identifier of the host of each; not needed if rounds are given.

    Returns
    -------
    Timeline
        The schedule with all messages matched and ordered.

    Raises
    ------
    ScheduleError
        At the first error found, in one sentence that specifies the round and the ranks.

    >>> from pydtnn.comm.schedules.steps import ALL, add, send
    >>> check([[(send(1, ALL),)], [(add(0, ALL),)]])
    Traceback (most recent call last):
    ...
    pydtnn.tools.schedules.timeline.ScheduleError: rank 0 lacks the contribution of rank 1 to ...
    """
    ranks = plan(schedule, hosts)
    for rank, its_rounds in enumerate(ranks):
        others = {*range(len(ranks))} - {rank}
        for k, steps in enumerate(its_rounds):
            for step in steps:
                _check_step(f"round {k} of rank {rank}", step, others)
            _check_writes(f"round {k} of rank {rank}", steps)
    done = timeline(ranks)
    pieces, everyone = done.chunks, (1 << len(ranks)) - 1
    for rank, held in enumerate(_final(done, contributions(done, len(ranks)), unite)):
        for chunk, value in zip(pieces, held, strict=True):
            if value != everyone:
                raise ScheduleError(
                    f"rank {rank} lacks the contribution of {_ranks(everyone & ~value)} to "
                    f"{show(chunk)} {_at_the_end(ranks[rank], chunk)}; add a receive of the sum."
                )
    return done


def associations(
    schedule: str | Algorithm | Plan, hosts: int | Sequence[Hashable] = ()
) -> frozenset[str]:
    """Return the orders in which the contributions are added, over all elements and ranks.

    Two orders are equal if they differ only by swapped operands, which does not change any bit of
    an IEEE sum. A schedule with a single order rounds all elements alike.

    Parameters and errors are those of `check`.

    >>> sorted(associations("ring", 3))
    ['((0 + 1) + 2)', '((0 + 2) + 1)', '(0 + (1 + 2))']
    >>> associations("fixed_tree", 6)
    frozenset({'(((0 + 1) + (2 + 3)) + (4 + 5))'})
    """
    ranks = plan(schedule, hosts)
    done = check(ranks)
    start = [[(rank, str(rank))] * len(done.chunks) for rank in range(len(ranks))]
    return frozenset(text for held in _final(done, start, _write) for _, text in held)


def plan(schedule: str | Algorithm | Plan, hosts: int | Sequence[Hashable] = ()) -> Plan:
    """List the rounds of every rank; parameters as for `check`."""
    if not isinstance(schedule, str) and not callable(schedule):
        return schedule
    names = range(hosts) if isinstance(hosts, int) else hosts
    if not names:
        raise ValueError("plan: expected at least one rank, got none; pass their number or hosts.")
    return [rounds(schedule, rank, names) for rank in range(len(names))]


def _check_step(where: str, step: MessageStep, others: set[int]) -> None:
    """Raise ScheduleError if a step is invalid by itself."""
    if step.peer not in others:
        raise ScheduleError(
            f"{where} must have one of the other {len(others)} ranks of the group as its peer, "
            f"got {step.peer}."
        )
    has = f"{where} has a step with rank {step.peer}"
    if step.op not in ("sum", "copy"):
        raise ScheduleError(f"{has}: op must be 'sum' or 'copy', got {step.op!r}.")
    parts = [part for part in (step.send, step.receive) if part is not None]
    if not parts:
        raise ScheduleError(f"{has} that neither sends nor receives; remove it.")
    for part in parts:
        exact = all(isinstance(end, int | Fraction) for end in part)
        if not exact or not ALL.start <= part.start < part.stop <= ALL.stop:
            raise ScheduleError(
                f"{has}: a part must be a non-empty interval of [0, 1) with exact fractions, got "
                f"{show(part)}."
            )


def _check_writes(where: str, steps: Round) -> None:
    """Raise ScheduleError if a part is written twice in a round, or overwritten while sent."""
    writes = [(step.peer, step.receive, step.op) for step in steps if step.receive is not None]
    sends = [(step.peer, step.send) for step in steps if step.send is not None]
    copies = [part for _, part, op in writes if op == "copy"]
    others = [part for _, part, op in writes if op == "sum"] + [part for _, part in sends]
    if _are_disjoint(copies, others):
        return
    for (first, part, op), (second, other, another) in combinations(writes, 2):
        if (op, another) != ("sum", "sum") and _overlap(part, other):
            raise ScheduleError(
                f"{where} receives {show(part)} from rank {first} and {show(other)} from rank "
                f"{second}, which overlap; add both, or receive one in a later round."
            )
    for source, part, op in writes:
        for to, other in sends:
            if op == "copy" and _overlap(part, other):
                raise ScheduleError(
                    f"{where} copies {show(part)} from rank {source} over {show(other)}, which it "
                    f"is sending to rank {to}; receive it in a later round."
                )


def _are_disjoint(copies: Sequence[Part], others: Sequence[Part]) -> bool:
    """Whether no copy overlaps another copy, or one of the others; in O(n log n) time."""
    ordered = sorted(copies, key=lambda part: part.start)
    if any(left.stop > right.start for left, right in pairwise(ordered)):
        return False
    starts = [part.start for part in ordered]
    for part in others if ordered else ():
        before = bisect_left(starts, part.stop)  # copies that begin before the part ends
        if before and ordered[before - 1].stop > part.start:
            return False
    return True


def contributions(done: MatchedPlan, size: int) -> list[list[int]]:
    """Return the content of each chunk on each rank before the first round: its own contribution.

    A set of contributions is a number with one bit for each rank that is in it.
    """
    return [[1 << rank] * len(done.chunks) for rank in range(size)]


def unite(message: PlanMessage, chunk: Part, here: int, comes: int) -> int:
    """Unite two sets of contributions; raise ScheduleError if they are not disjoint."""
    if here & comes:
        raise ScheduleError(
            f"round {message.received} of rank {message.receiver} adds {show(chunk)} from rank "
            f"{message.sender}, but it already includes the contribution of "
            f"{_ranks(here & comes)}; add each contribution once."
        )
    return here | comes


def _write(
    message: PlanMessage, chunk: Part, here: tuple[int, str], comes: tuple[int, str]
) -> tuple[int, str]:
    """Return a sum as text, the operand with the lower rank first."""
    (first, left), (_, right) = sorted((here, comes))
    return first, f"({left} + {right})"


def _final(
    done: MatchedPlan, values: list[list[V]], add: Callable[[PlanMessage, Part, V, V], V]
) -> list[list[V]]:
    """Return the final values of all ranks."""
    for _ in carry_out(done, values, add):
        pass
    return values


def _ranks(bits: int) -> str:
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def _at_the_end(rounds: Sequence[Round], chunk: Part) -> str:
    """Describe after how many rounds a rank is complete, and which of them wrote a chunk last."""
    if not rounds:
        return "and has no rounds"
    writes = [
        k
        for k, steps in enumerate(rounds)
        for step in steps
        if step.receive is not None and _overlap(step.receive, chunk)
    ]
    wrote = f"which round {writes[-1]} wrote last" if writes else "which no round writes"
    return f"after round {len(rounds) - 1}, the last, {wrote}"


def _overlap(part: Part, other: Part) -> bool:
    return part.start < other.stop and other.start < part.stop
