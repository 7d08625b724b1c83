"""Drawing of a pipeline schedule: what each stage computes, and the messages between stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydtnn.model.pipeline.check import TimedAction, Timetable, source_of
from pydtnn.tools.schedules.figures import INK, LINE, QUIET, save_figure

LETTERS = {"forward": "f", "backward": "b", "backward_inputs": "b", "backward_parameters": "w"}
"""Kinds of actions in a table."""


def text(name: str, done: Timetable) -> str:
    """Format a schedule as a table, with a row for each rank and a column for each unit of time.

    Parameters
    ----------
    name : str
        Name of the schedule.
    done : Timeline
        The schedule, as `check` returns it, with whole numbers as times.

    >>> from pydtnn.model.pipeline.check import check
    >>> print(text("1f1b", check("1f1b", 2, 2)))
    1f1b: 2 stages, 2 micro-batches, 33 % of the time idle; values of 2, 1 micro-batches kept
    f0: forward of micro-batch 0, b0: backward
    <BLANKLINE>
    stage 0  f0 f1       b0 b0    b1 b1
    stage 1     f0 b0 b0 f1 b1 b1
    """
    own = [done.stages_of(rank) for rank in range(done.ranks)]
    width = len(str(done.micro_batches - 1)) + max(map(len, own))
    columns = round(done.duration)
    words = "gradients of inputs, w0: of parameters" if done.has_halves else "backward"
    lines = [title(name, done), f"f0: forward of micro-batch 0, b0: {words}", ""]
    for rank in range(done.ranks):
        cells = [""] * columns
        for event in done.of(rank):
            label = f"{LETTERS[event.action.kind]}{event.action.micro_batch}"
            label += "'" * own[rank].index(event.action.stage)
            for time in range(round(event.begin), round(event.end)):
                cells[time] = label
        row = " ".join(cell.ljust(width) for cell in cells)
        lines.append(f"{row_name(done, rank)}  {row}".rstrip())
    return "\n".join(lines)


def title(name: str, done: Timetable) -> str:
    """Return a line with the numbers of stages and micro-batches, the bubble and the memory."""
    kept = ", ".join(f"{number:g}" for number in done.in_flight)
    ranks = "" if done.ranks == done.stages else f" on {done.ranks} ranks"
    return (
        f"{name}: {done.stages} stages{ranks}, {done.micro_batches} micro-batches, "
        f"{100 * done.bubble:.0f} % of the time idle; values of {kept} micro-batches kept"
    )


def row_name(done: Timetable, rank: int) -> str:
    """Return the stages of a rank in words."""
    own = done.stages_of(rank)
    return f"stage{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"


MAX_ACTIONS = 2048
"""Maximum number of actions that fit on a page."""

UNIT, ROW = 0.32, 0.5
"""Inches of a unit of time, and from stage to stage."""

COLORS = {
    "forward": "#9db8da",
    "backward": "#e0a98c",
    "backward_inputs": "#e0a98c",
    "backward_parameters": "#b9cf9f",
}

WORDS = {"backward_inputs": "gradients of inputs", "backward_parameters": "of parameters"}
"""Kinds of actions in the legend, where they are not their names."""


def draw(path: Path, name: str, done: Timetable) -> None:
    """Draw a schedule into a file.

    Time increases to the right; each rank is a row. A box is an action with the number of its
    micro-batch, and a line between two rows the message that an action waits for. What is left
    white is the bubble.

    Parameters
    ----------
    path : Path
        A file whose name ends in ".png", ".pdf" or ".svg".
    name : str
        Name of the schedule.
    done : Timeline
        The schedule, as `check` returns it.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    OSError
        If the file cannot be written.
    ValueError
        If the kind of file is not supported, or there are more actions than fit on a page.
    """
    if len(done.events) > MAX_ACTIONS:
        raise ValueError(
            f"draw: expected at most {MAX_ACTIONS} actions in a picture, got {len(done.events)}; "
            "use fewer stages or micro-batches"
        )
    save_figure("draw", path, lambda make: _figure(make, name, done))


def _figure(make: Any, name: str, done: Timetable) -> Any:
    """Lay out the page; the row of rank r is at y = r, and time t at x = t."""
    left, head, foot = 3.0, 1.9, 0.9
    width, height = max(done.duration + left + 0.5, 20), done.ranks + head + foot
    figure = make(figsize=(UNIT * width, ROW * height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-left, width - left), ylim=(done.ranks - 0.5 + foot, -0.5 - head))
    axes.axis("off")
    first, _, second = title(name, done).partition(": ")
    words: dict[str, Any] = {"va": "center"}
    axes.text(0, -0.1 - head, first, size=12, weight="bold", color=INK, **words)
    axes.text(0, 0.6 - head, second, color=QUIET, **words)
    for rank in range(done.ranks):
        axes.plot((0, done.duration), (rank, rank), color=LINE, lw=0.8, zorder=1)
        axes.text(-0.3, rank, row_name(done, rank), ha="right", size=8, color=QUIET, **words)
    sent = {(e.action.stage, e.action.direction, e.action.micro_batch): e for e in done.events}
    for event in done.events:
        source, action = source_of(event.action, done.stages), event.action
        if source is not None:
            _message(axes, sent[source, action.direction, action.micro_batch], event)
        _box(axes, event, done.stages_of(event.rank).index(action.stage))
    for place, kind in enumerate(k for k in COLORS if any(e.action.kind == k for e in done.events)):
        x = 7 * place
        axes.add_patch(_rectangle(x, done.ranks - 0.3, 0.8, 0.4, COLORS[kind]))
        text_of = WORDS.get(kind, kind)
        axes.text(x + 1.1, done.ranks - 0.1, text_of, size=8, color=QUIET, **words)
    if len(done.stages_of(0)) > 1:
        text_of = "paler: the later stages of a rank"
        axes.text(x + 7, done.ranks - 0.1, text_of, size=8, color=QUIET, **words)
    return figure


def _message(axes: Any, sent: TimedAction, received: TimedAction) -> None:
    axes.plot((sent.end, received.begin), (sent.rank, received.rank), color=QUIET, lw=0.6, zorder=2)


def _box(axes: Any, event: TimedAction, place: int) -> None:
    """Draw an action with the number of its micro-batch; paler in a rank's later stages."""
    duration, color = event.end - event.begin, _paler(COLORS[event.action.kind], place)
    axes.add_patch(_rectangle(event.begin, event.rank - 0.35, duration, 0.7, color))
    axes.text(
        (event.begin + event.end) / 2,
        event.rank,
        str(event.action.micro_batch),
        ha="center",
        va="center",
        size=7,
        color=INK,
        zorder=4,
    )


def _paler(color: str, place: int) -> str:
    """Return a color mixed with `place` parts of white.

    >>> _paler("#102030", 1)
    '#878f97'
    """
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(own + 255 * place) // (1 + place):02x}" for own in parts)


def _rectangle(x: float, y: float, width: float, height: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color, edgecolor="white", lw=0.8, zorder=3)
