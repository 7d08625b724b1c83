"""Drawing of a schedule: the arrays of all ranks, and the messages between them in each round."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

from pydtnn.comm.schedules.check import contributions, unite
from pydtnn.comm.schedules.draw import array, busiest, runs, title
from pydtnn.comm.schedules.steps import Part
from pydtnn.comm.schedules.symbols import carry_out
from pydtnn.comm.schedules.timeline import Message, Timeline
from pydtnn.utils.files import write_file
from pydtnn.utils.optional import import_optional

FORMATS = (".png", ".pdf", ".svg")
MOST_RANKS = 32

COLUMN, ROW = 0.95, 0.66
"""Inches from rank to rank, and from round to round: the units of x and y in the drawing."""

BAR, THICKNESS, HEAD = 0.74, 0.2, 0.09
"""Width and height of the array of a rank, and height of an arrow's head."""

INK, QUIET, BAND, LINE = "#222222", "#777777", "#f4f4f1", "#d8d8d2"
PALETTE = ("#3470b5", "#6a5cc0", "#a94fae", "#cf4a75", "#d9693a", "#cf9a1f", "#7fa52f", "#2a9a7c")

STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "pdf.fonttype": 42,  # embed text as text
    "svg.fonttype": "none",
}


def draw(path: Path, name: str, done: Timeline, hosts: Sequence[Hashable]) -> None:
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
    if path.suffix not in FORMATS:
        raise ValueError(f"draw: the file name must end in one of {', '.join(FORMATS)}, got {path}")
    if len(hosts) > MOST_RANKS:
        raise ValueError(
            f"draw: expected at most {MOST_RANKS} ranks in a picture, got {len(hosts)}; use fewer."
        )
    mpl = import_optional("matplotlib", "matplotlib", "draw: a picture")
    content = BytesIO()
    with mpl.rc_context(STYLE):
        _figure(name, done, hosts).savefig(content, format=path.suffix[1:], dpi=200)
    write_file("draw", path, content.getvalue())


def _figure(name: str, done: Timeline, hosts: Sequence[Hashable]) -> Any:
    """Lay out the page; rank r is at x = r, and round k extends from y = k down to y = k + 1."""
    from matplotlib.figure import Figure

    head = 2.2 if len(runs(hosts)) > 1 else 1.9
    width, height = max(len(hosts) + 1.9, 6.2), done.rows + head + 1.3
    figure = Figure(figsize=(COLUMN * width, ROW * height))
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


def _frame(axes: Any, done: Timeline, hosts: Sequence[Hashable]) -> None:
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


def _arrows(axes: Any, done: Timeline, colors: list[Any]) -> None:
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


def _arrow(message: Message, piece: Part) -> Any:
    """Return the outline of an arrow from a stretch of the sender's array to the receiver's."""
    from matplotlib.path import Path as Outline

    top, tip = message.row + THICKNESS / 2, message.row + 1 - THICKNESS / 2
    neck = tip - HEAD
    middle = (top + neck) / 2
    (a, b), (c, d) = _stretch(message.sender, piece), _stretch(message.receiver, piece)
    left = [(a, top), (a, middle), (c, middle), (c, neck)]
    right = [(d, neck), (d, middle), (b, middle), (b, top)]
    bend = [Outline.CURVE4] * 3
    codes = [Outline.MOVETO, *bend, Outline.LINETO, Outline.LINETO, *bend, Outline.CLOSEPOLY]
    return Outline([*left, ((c + d) / 2, tip), *right, (a, top)], codes)


def _arrays(axes: Any, done: Timeline, size: int, colors: list[Any]) -> None:
    """Draw the arrays of all ranks before and after each round."""
    from matplotlib.collections import PolyCollection

    pieces, full = done.chunks, _stretch(0, Part(Fraction(0), Fraction(1)))
    boxes, shades, frames = [], [], []
    for row, rank, held in _states(done, size):
        frames.append(_box(full[0] + rank, full[1] + rank, row))
        for piece, color, value in zip(pieces, colors, held, strict=True):
            boxes.append(_box(*_stretch(rank, piece), row))
            share = value.bit_count() / size
            shades.append(_tint(color, 1.0 if share == 1 else 0.1 + 0.5 * share))
    gap = 0.5 if len(pieces) <= 32 else 0.0
    axes.add_collection(
        PolyCollection(boxes, facecolors=shades, edgecolors="white", linewidths=gap, zorder=4)
    )
    axes.add_collection(
        PolyCollection(frames, facecolors="none", edgecolors=INK, linewidths=0.7, zorder=5)
    )


def _states(done: Timeline, size: int) -> Iterator[tuple[int, int, list[int]]]:
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


def _stretch(rank: int, piece: Part) -> tuple[float, float]:
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
