"""Drawing of a schedule: the arrays of all ranks, and the messages between them in each round."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

from pydtnn.comm.schedules.steps import Part
from pydtnn.tools.schedules.check import carry_out, contributions, unite
from pydtnn.tools.schedules.figures import BAND, INK, LINE, PALETTE, QUIET, save_figure
from pydtnn.tools.schedules.timeline import MatchedPlan, PlanMessage

MAX_RANK_COLUMNS = 16
"""Maximum number of ranks in a text, each with a column."""


def text(name: str, done: MatchedPlan, hosts: Sequence[Hashable]) -> str:
    """Format a schedule as a table, with a row for each round and a column for each rank.

    Parameters
    ----------
    name : str
        Name of the schedule.
    done : Timeline
        The schedule, as `check` returns it.
    hosts : sequence of hashable
        Identifier of the host of each rank.

    Raises
    ------
    ValueError
        If there are more ranks than columns.
    """
    if len(hosts) > MAX_RANK_COLUMNS:
        raise ValueError(
            f"draw: expected at most {MAX_RANK_COLUMNS} ranks as text, got {len(hosts)}; use "
            "--output FILE, or check, which prints rounds and volumes"
        )
    lines = [title(name, done, hosts)]
    if done.messages:
        lines += [_legend(done), "", *_table(done, hosts)]
    return "\n".join(lines)


def title(name: str, done: MatchedPlan, hosts: Sequence[Hashable]) -> str:
    """Return a line with the numbers of ranks and rounds and the volume of the busiest rank."""
    most = busiest(done.messages)
    total = sum(length(message.part) for message in done.messages)
    messages = max(Counter(message.sender for message in done.messages).values(), default=0)
    where = "" if len(set(hosts)) == len(hosts) else f" on {count(len(set(hosts)), 'host')}"
    who = "each rank sends" if total == most * len(hosts) else "the busiest rank sends"
    return f"{name} of {count(len(hosts), 'rank')}{where}: {count(done.rows, 'round')}; " + (
        f"{who} {array(most)} in {count(messages, 'message')}" if most else "nothing is sent"
    )


def busiest(messages: Iterable[PlanMessage]) -> Fraction:
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


def _legend(done: MatchedPlan) -> str:
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


def _table(done: MatchedPlan, hosts: Sequence[Hashable]) -> list[str]:
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


def _in_order(message: PlanMessage) -> tuple[int, int, int, Part, int]:
    return message.row, message.sender, message.sent, message.part, message.receiver


MAX_RANKS = 32

COLUMN, ROW = 0.95, 0.66
"""Inches from rank to rank, and from round to round: the units of x and y in the drawing."""

BAR, THICKNESS, HEAD = 0.74, 0.2, 0.09
"""Width and height of the array of a rank, and height of an arrow's head."""


def draw(path: Path, name: str, done: MatchedPlan, hosts: Sequence[Hashable]) -> None:
    """Draw a schedule into a file.

    Time increases down the page. The array of every rank is drawn before and after each round: the
    colour of a part is stronger the more contributions it contains. Arrows are messages, from a
    stretch of the sender's array to the same stretch of the receiver's: filled if it is added,
    hollow if it replaces the previous values.

    Parameters
    ----------
    path : Path
        A file whose name ends in ".png", ".pdf" or ".svg".
    name : str
        Name of the schedule.
    done : Timeline
        The schedule, as `check` returns it.
    hosts : sequence of hashable
        Identifier of the host of each rank.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    OSError
        If the file cannot be written.
    ValueError
        If the kind of file is not supported, or there are more ranks than fit on a page.
    """
    if len(hosts) > MAX_RANKS:
        raise ValueError(
            f"draw: expected at most {MAX_RANKS} ranks in a picture, got {len(hosts)}; use fewer."
        )
    save_figure("draw", path, lambda make: _figure(make, name, done, hosts))


def _figure(make: Any, name: str, done: MatchedPlan, hosts: Sequence[Hashable]) -> Any:
    """Lay out the page; rank r is at x = r, and round k extends from y = k down to y = k + 1."""
    head = 2.2 if len(runs(hosts)) > 1 else 1.9
    width, height = max(len(hosts) + 1.9, 6.2), done.rows + head + 1.3
    figure = make(figsize=(COLUMN * width, ROW * height))
    axes = figure.add_axes((0, 0, 1, 1))
    middle = (len(hosts) - 1) / 2
    axes.set(xlim=(middle - width / 2, middle + width / 2), ylim=(done.rows + 1.3, -head))
    axes.axis("off")
    _frame(axes, done, hosts)
    colors = _colors(len(done.chunks))
    _arrows(axes, done, colors)
    _arrays(axes, done, len(hosts), colors)
    first, _, second = title(name, done, hosts).partition(": ")
    words: dict[str, Any] = {"ha": "center", "va": "center"}
    axes.text(middle, 0.45 - head, first, size=12, weight="bold", color=INK, **words)
    axes.text(middle, 0.85 - head, f"{second} (n: bytes of the array)", color=QUIET, **words)
    _key(axes, middle, done.rows + 0.85, colors)
    return figure


def _frame(axes: Any, done: MatchedPlan, hosts: Sequence[Hashable]) -> None:
    """Draw hosts as bands, ranks as vertical lines, and their labels."""
    groups, right = runs(hosts), len(hosts) - 0.4
    words: dict[str, Any] = {"va": "center", "color": QUIET, "size": 8}
    for host, first, size in groups:
        edges = first - 0.47, first + size - 0.53
        top = -1.05 if len(groups) > 1 else -0.7
        axes.fill_betweenx((top, done.rows + 0.25), *edges, color=BAND, lw=0, zorder=0)
        if len(groups) > 1:
            axes.text(sum(edges) / 2, -0.8, f"host {host}", ha="center", **words)
    for rank in range(len(hosts)):
        axes.plot((rank, rank), (0, done.rows), color=LINE, lw=0.8, zorder=1)
        axes.text(rank, -0.38, str(rank), ha="center", va="center", weight="bold", color=INK)
    axes.text(-0.6, -0.38, "rank", ha="right", **words)
    axes.text(right, -0.38, "sends", ha="left", **words)
    for row in range(done.rows):
        sent = array(busiest(message for message in done.messages if message.row == row))
        axes.text(-0.6, row + 0.5, f"round {row}", ha="right", **words)
        axes.text(right, row + 0.5, sent, ha="left", **words)


def _colors(pieces: int) -> list[Any]:
    """Return a colour for each piece of the array, similar for neighbours."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("pieces", PALETTE)
    return [colors(i / max(pieces - 1, len(PALETTE) - 1))[:3] for i in range(pieces)]


def _arrows(axes: Any, done: MatchedPlan, colors: list[Any]) -> None:
    """Draw all messages, those over long distances behind the others."""
    from matplotlib.collections import PathCollection

    pieces = done.chunks
    paths, faces, edges = [], [], []
    for message in sorted(done.messages, key=lambda m: -abs(m.receiver - m.sender)):
        for piece, color in zip(pieces, colors, strict=True):
            if message.part.start <= piece.start < message.part.stop:
                paths.append(_arrow(message, piece))
                faces.append(_tint(color, 0.62 if message.op == "sum" else 0.0))
                edges.append(color)
    axes.add_collection(
        PathCollection(paths, facecolors=faces, edgecolors=edges, linewidths=0.7, zorder=2)
    )


def _arrow(message: PlanMessage, piece: Part) -> Any:
    """Return the outline of an arrow from a stretch of the sender's array to the receiver's."""
    from matplotlib.path import Path as Outline

    top, tip = message.row + THICKNESS / 2, message.row + 1 - THICKNESS / 2
    neck = tip - HEAD
    middle = (top + neck) / 2
    (a, b), (c, d) = _interval(message.sender, piece), _interval(message.receiver, piece)
    left = [(a, top), (a, middle), (c, middle), (c, neck)]
    right = [(d, neck), (d, middle), (b, middle), (b, top)]
    bend = [Outline.CURVE4] * 3
    codes = [Outline.MOVETO, *bend, Outline.LINETO, Outline.LINETO, *bend, Outline.CLOSEPOLY]
    return Outline([*left, ((c + d) / 2, tip), *right, (a, top)], codes)


def _arrays(axes: Any, done: MatchedPlan, size: int, colors: list[Any]) -> None:
    """Draw the arrays of all ranks before and after each round."""
    from matplotlib.collections import PolyCollection

    pieces, full = done.chunks, _interval(0, Part(Fraction(0), Fraction(1)))
    boxes, shades, frames = [], [], []
    for row, rank, held in _states(done, size):
        frames.append(_box(full[0] + rank, full[1] + rank, row))
        for piece, color, value in zip(pieces, colors, held, strict=True):
            boxes.append(_box(*_interval(rank, piece), row))
            share = value.bit_count() / size
            shades.append(_tint(color, 1.0 if share == 1 else 0.1 + 0.5 * share))
    gap = 0.5 if len(pieces) <= 32 else 0.0
    axes.add_collection(
        PolyCollection(boxes, facecolors=shades, edgecolors="white", linewidths=gap, zorder=4)
    )
    axes.add_collection(
        PolyCollection(frames, facecolors="none", edgecolors=INK, linewidths=0.7, zorder=5)
    )


def _states(done: MatchedPlan, size: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the contributions in the array of each rank before each row and after the last."""
    values = contributions(done, size)
    states = [{0: list(held)} for held in values]
    for event in carry_out(done, values, unite):
        states[event.rank][event.row] = list(values[event.rank])
    for rank, known in enumerate(states):
        for row in range(done.rows + 1):
            known.setdefault(row, known.get(row - 1, []))
            yield row, rank, known[row]


def _key(axes: Any, middle: float, y: float, colors: list[Any]) -> None:
    """Draw the legend of filled and hollow arrows and of weak and strong colours."""
    from matplotlib.patches import Rectangle

    color = colors[0]
    words: dict[str, Any] = {"va": "center", "color": QUIET, "size": 8}
    entries = [
        (0.62, 0.7, "sent and added"),
        (0.0, 0.7, "sent and put in place"),
        (0.15, 0.0, "own contribution"),
        (1.0, 0.0, "sum of all"),
    ]
    places = [middle + offset for offset in (-2.75, -1.35, 0.45, 1.95)]
    for x, (strength, edge, meaning) in zip(places, entries, strict=True):
        box = Rectangle(
            (x - 0.2, y - 0.1),
            0.16,
            0.2,
            facecolor=_tint(color, strength),
            edgecolor=color,
            lw=edge,
        )
        axes.add_patch(box)
        axes.text(x, y, meaning, ha="left", **words)


def _interval(rank: int, piece: Part) -> tuple[float, float]:
    """Return the first and last x of a stretch of a rank's array on the page."""
    left = rank - BAR / 2
    return left + BAR * float(piece.start), left + BAR * float(piece.stop)


def _box(left: float, right: float, row: int) -> list[tuple[float, float]]:
    """Return the corners of a stretch of an array before a row."""
    top, bottom = row - THICKNESS / 2, row + THICKNESS / 2
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _tint(color: Any, strength: float) -> tuple[float, ...]:
    """Mix a colour with white."""
    return tuple(1 - strength * (1 - channel) for channel in color)
