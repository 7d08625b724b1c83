"""Drawing of a pipeline schedule: what each stage computes, and the messages between stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydtnn.comm.schedules.picture import INK, LINE, QUIET
from pydtnn.parallel.pipeline.check import Event, Timeline, source_of
from pydtnn.utils.figures import save_figure

LETTERS = {"forward": "f", "backward": "b", "backward_inputs": "b", "backward_parameters": "w"}
"""Kinds of actions in a table."""


def text(name: str, done: Timeline) -> str:
    """Format a schedule as a table, with a row for each stage and a column for each unit of time.

    Parameters
    ----------
    name : str
        Name of the schedule.
    done : Timeline
        The schedule, as `check` returns it, with whole numbers as times.

    >>> from pydtnn.parallel.pipeline.check import check
    >>> print(text("1f1b", check("1f1b", 2, 2)))
    1f1b: 2 stages, 2 micro-batches, 33 % of the time idle; values of 2, 1 micro-batches kept
    f0: forward of micro-batch 0, b0: backward
    <BLANKLINE>
    stage 0  f0 f1    b0 b0 b1 b1
    stage 1     f0 b0 b0 f1 b1 b1
    """
    width = len(str(done.micro_batches - 1)) + 1
    columns = round(done.duration)
    words = "gradients of inputs, w0: of parameters" if done.has_halves else "backward"
    lines = [title(name, done), f"f0: forward of micro-batch 0, b0: {words}", ""]
    for stage in range(done.stages):
        cells = [""] * columns
        for event in done.of(stage):
            label = f"{LETTERS[event.action.kind]}{event.action.micro_batch}"
            for time in range(round(event.begin), round(event.end)):
                cells[time] = label
        row = " ".join(cell.ljust(width) for cell in cells)
        lines.append(f"stage {stage}  {row}".rstrip())
    return "\n".join(lines)


def title(name: str, done: Timeline) -> str:
    """Return a line with the numbers of stages and micro-batches, the bubble and the memory."""
    kept = ", ".join(map(str, done.in_flight))
    return (
        f"{name}: {done.stages} stages, {done.micro_batches} micro-batches, "
        f"{100 * done.bubble:.0f} % of the time idle; values of {kept} micro-batches kept"
    )


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


def draw(path: Path, name: str, done: Timeline) -> None:
    """Draw a schedule into a file.

    Time increases to the right; each stage is a row. A box is an action with the number of its
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


def _figure(make: Any, name: str, done: Timeline) -> Any:
    """Lay out the page; the row of stage s is at y = s, and time t at x = t."""
    left, head, foot = 3.0, 1.9, 0.9
    width, height = max(done.duration + left + 0.5, 20), done.stages + head + foot
    figure = make(figsize=(UNIT * width, ROW * height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-left, width - left), ylim=(done.stages - 0.5 + foot, -0.5 - head))
    axes.axis("off")
    first, _, second = title(name, done).partition(": ")
    words: dict[str, Any] = {"va": "center"}
    axes.text(0, -0.1 - head, first, size=12, weight="bold", color=INK, **words)
    axes.text(0, 0.6 - head, second, color=QUIET, **words)
    for stage in range(done.stages):
        axes.plot((0, done.duration), (stage, stage), color=LINE, lw=0.8, zorder=1)
        axes.text(-0.3, stage, f"stage {stage}", ha="right", size=8, color=QUIET, **words)
    sent = {(e.stage, e.action.direction, e.action.micro_batch): e for e in done.events}
    for event in done.events:
        source, action = source_of(event.stage, done.stages, event.action), event.action
        if source is not None:
            _message(axes, sent[source, action.direction, action.micro_batch], event)
        _box(axes, event)
    for place, kind in enumerate(k for k in COLORS if any(e.action.kind == k for e in done.events)):
        x = 7 * place
        axes.add_patch(_rectangle(x, done.stages - 0.3, 0.8, 0.4, COLORS[kind]))
        text_of = WORDS.get(kind, kind)
        axes.text(x + 1.1, done.stages - 0.1, text_of, size=8, color=QUIET, **words)
    return figure


def _message(axes: Any, sent: Event, received: Event) -> None:
    axes.plot(
        (sent.end, received.begin), (sent.stage, received.stage), color=QUIET, lw=0.6, zorder=2
    )


def _box(axes: Any, event: Event) -> None:
    """Draw an action with the number of its micro-batch."""
    duration, color = event.end - event.begin, COLORS[event.action.kind]
    axes.add_patch(_rectangle(event.begin, event.stage - 0.35, duration, 0.7, color))
    axes.text(
        (event.begin + event.end) / 2,
        event.stage,
        str(event.action.micro_batch),
        ha="center",
        va="center",
        size=7,
        color=INK,
        zorder=4,
    )


def _rectangle(x: float, y: float, width: float, height: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color, edgecolor="white", lw=0.8, zorder=3)
