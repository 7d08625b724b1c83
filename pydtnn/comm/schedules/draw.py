"""Text output of a schedule: the messages of every rank and round, and their parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from itertools import groupby

from pydtnn.comm.schedules.steps import Part
from pydtnn.comm.schedules.timeline import Message, Timeline

WIDEST = 16
"""Maximum number of ranks with a column each; with more, each round is summarised in a line."""


def text(name: str, done: Timeline, hosts: Sequence[Hashable]) -> str:
    """Format a schedule as a table, with a row for each round and a column for each rank.

    Parameters
    ----------
    name : str
        Name of the schedule.
    done : Timeline
        The schedule, as `check` returns it.
    hosts : sequence of hashable
        Identifier of the host of each rank.
    """
    lines = [title(name, done, hosts)]
    if done.messages:
        table = _table if len(hosts) <= WIDEST else _digest
        lines += [_legend(done), "", *table(done, hosts)]
    return "\n".join(lines)


def title(name: str, done: Timeline, hosts: Sequence[Hashable]) -> str:
    """Return a line with the numbers of ranks and rounds and the volume of the busiest rank."""
    most = busiest(done.messages)
    total = sum(length(message.part) for message in done.messages)
    messages = max(Counter(message.sender for message in done.messages).values(), default=0)
    where = "" if len(set(hosts)) == len(hosts) else f" on {count(len(set(hosts)), 'host')}"
    who = "each rank sends" if total == most * len(hosts) else "the busiest rank sends"
    return f"{name} of {count(len(hosts), 'rank')}{where}: {count(done.rows, 'round')}; " + (
        f"{who} {array(most)} in {count(messages, 'message')}" if most else "nothing is sent"
    )


def busiest(messages: Iterable[Message]) -> Fraction:
    """Return the volume that the busiest rank sends, as a multiple of the array."""
    sent: dict[int, Fraction] = defaultdict(Fraction)
    for message in messages:
        sent[message.sender] += length(message.part)
    return max(sent.values(), default=Fraction(0))


def length(part: Part) -> Fraction:
    """Return the length of a part as a fraction of the array's."""
    return part.stop - part.start


def array(share: Fraction) -> str:
    """Format a multiple of the array of n bytes.

    >>> array(Fraction(7, 4)), array(Fraction(1)), array(Fraction(1, 8))
    ('1.75 n', 'n', 'n/8')
    """
    if share.numerator == 1:
        return "n" if share == 1 else f"n/{share.denominator}"
    return f"{float(share):.3g} n"


def count(number: int, thing: str) -> str:
    """Format a number of things.

    >>> count(1, "round"), count(2, "round")
    ('1 round', '2 rounds')
    """
    return f"{number} {thing}{'s' * (number != 1)}"


def runs(hosts: Sequence[Hashable]) -> list[tuple[str, int, int]]:
    """Return runs of neighbouring ranks on one host: its name, the first rank, their number.

    A single run if every rank is on a host of its own, as the grouping has no information then.

    >>> runs(["a", "a", "b", "a"])
    [('a', 0, 2), ('b', 2, 1), ('a', 3, 1)]
    """
    if len(set(hosts)) == len(hosts):
        return [("", 0, len(hosts))]
    found, first = [], 0
    for host, ranks in groupby(hosts):
        size = len(list(ranks))
        found.append((str(host), first, size))
        first += size
    return found


def _legend(done: Timeline) -> str:
    """Return the explanation of the table."""
    pieces = done.chunks
    what, parts = "k", "the array of n bytes stays whole"
    if len(pieces) > 1:
        equal = " equal" * (len({length(piece) for piece in pieces}) == 1)
        parts = f"the array of n bytes is in {len(pieces)}{equal} parts, 0 to {len(pieces) - 1}"
    else:
        what = "all"
    return (
        f"{parts}\n{what} +> r: sends {what} to rank r, which adds it to its own\n"
        f"{what} => r: sends {what} to rank r, which takes it instead of its own"
    )


def _label(part: Part, pieces: list[Part]) -> str:
    """Name a part by the pieces it contains: "3", "0-3", "all"."""
    inside = [i for i, piece in enumerate(pieces) if part.start <= piece.start < part.stop]
    if len(inside) == len(pieces):
        return "all"
    return str(inside[0]) if len(inside) == 1 else f"{inside[0]}-{inside[-1]}"


def _table(done: Timeline, hosts: Sequence[Hashable]) -> list[str]:
    """Return a row for each round, with the parts that each rank sends."""
    pieces, groups = done.chunks, runs(hosts)
    cells: dict[tuple[int, int], list[str]] = defaultdict(list)
    for message in sorted(done.messages, key=_in_order):
        arrow = "+>" if message.op == "sum" else "=>"
        label = _label(message.part, pieces)
        cells[message.row, message.sender].append(f"{label} {arrow} {message.receiver}")
    heads = [f"rank {rank}" for rank in range(len(hosts))]
    widths = [len(head) for head in heads]
    for (_, rank), sent in cells.items():
        widths[rank] = max(widths[rank], *map(len, sent))

    def line(first: str, columns: Sequence[str]) -> str:
        padded = [column.ljust(width) for column, width in zip(columns, widths, strict=True)]
        stretches = ["  ".join(padded[at : at + size]) for _, at, size in groups]
        return f"{first:>5}  {' | '.join(stretches)}".rstrip()

    lines = [line("round", heads)]
    if len(groups) > 1:
        names = [""] * len(hosts)
        for host, first, _ in groups:
            names[first] = f"host {host}"
        lines.insert(0, line("", names))
    for row in range(done.rows):
        tallest = max(len(cells[row, rank]) for rank in range(len(hosts)))
        for i in range(tallest):
            columns = [(cells[row, rank] + [""] * tallest)[i] for rank in range(len(hosts))]
            lines.append(line(str(row) if i == 0 else "", columns))
    return lines


def _digest(done: Timeline, hosts: Sequence[Hashable]) -> list[str]:
    """Return a line for each round, or for several equal rounds, with the messages of all ranks."""
    by_row: dict[int, list[Message]] = defaultdict(list)
    for message in done.messages:
        by_row[message.row].append(message)
    lines = ["rounds    messages  between hosts  added  distance      largest  busiest rank sends"]
    described = ((row, _row(messages, hosts)) for row, messages in sorted(by_row.items()))
    for line, alike in groupby(described, key=lambda pair: pair[1]):
        rows = [row for row, _ in alike]
        numbers = f"{rows[0]}-{rows[-1]}" if len(rows) > 1 else str(rows[0])
        lines.append(f"{numbers:<9}{line}")
    return lines


def _row(messages: list[Message], hosts: Sequence[Hashable]) -> str:
    away = {abs(message.receiver - message.sender) for message in messages}
    near = {min(distance, len(hosts) - distance) for distance in away}  # as on a ring
    distance = f"{min(near)} to {max(near)}" if len(near) > 1 else str(*near)
    crossing = sum(hosts[message.sender] != hosts[message.receiver] for message in messages)
    sums = sum(message.op == "sum" for message in messages)
    largest = array(max(length(message.part) for message in messages))
    return (
        f"{len(messages):>9}{crossing:>15}{sums:>7}  {distance:<10}{largest:>11}"
        f"{array(busiest(messages)):>20}"
    )


def _in_order(message: Message) -> tuple[int, int, int, Part, int]:
    return message.row, message.sender, message.sent, message.part, message.receiver
