"""The figures of a report as files for a paper, drawn by Matplotlib from the same content."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from pydtnn.tools.report.section import Figure, Section
from pydtnn.utils.figures import save_figure

FORMATS = ("pdf", "png", "svg")

COLUMN_INCHES, PAGE_INCHES = 3.4, 7.0
"""Width of a figure in one of two columns, and across both."""

PIXELS_PER_INCH = 150
"""Pixels of the page's figures for an inch of height."""

MIN_INCHES = 1.1
"""Smallest height of a figure, without its legend."""

HANDLE_INCHES, CHARACTER_INCHES, ENTRY_INCHES = 0.4, 0.06, 0.15
"""Widths of the line or patch of an entry of a legend and of a character, and the height."""

PNG_DPI = 300

LINE_SCALE = 0.55
"""Width of a line in points, relative to its width on the page in pixels."""

STYLE = {
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "grid.color": "#DDDDDD",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}
"""Properties of Matplotlib, besides those of all figures."""

DASHES: dict[str, Any] = {
    "dash": (0, (4, 2)),
    "dot": (0, (1, 1.5)),
    "dashdot": "-.",
    "longdash": (0, (8, 3)),
}

SYMBOLS = {"circle": "o", "square": "s", "diamond": "D", "cross": "X"}


def draw_figures(sections: Sequence[Section], folder: str | Path, format: str) -> list[Path]:
    """Write each figure of sections to a file, named after its section and its title.

    They have no titles, which are those of captions, and legends of their own. Fonts are vectors.

    Parameters
    ----------
    sections : sequence of Section
    folder : str or Path
        Created if necessary.
    format : str
        One of `FORMATS`.

    Returns
    -------
    list of Path

    Raises
    ------
    ImportError
        If Matplotlib is not installed, with the command that installs it.
    OSError
        If a file cannot be written.
    """
    paths: list[Path] = []
    for section, figure in ((own, figure) for own in sections for figure in own.figures):
        name = _slug(f"{section.name} {figure.title.partition(',')[0]}")
        path = Path(folder) / f"{name}.{format}"
        while path in paths:
            path = path.with_stem(f"{path.stem}-{len(paths)}")
        draw = partial(_draw, section, figure)
        save_figure("report: --figures", path, draw, STYLE, dpi=PNG_DPI)
        paths.append(path)
    return paths


def _slug(text: str) -> str:
    """Return a name of a file: "layers run-1: time of each layer" is "layers-run-1-time-of-...".

    >>> _slug("phases two/run: time of each rank")
    'phases-two-run-time-of-each-rank'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _draw(section: Section, figure: Figure, make: Any) -> Any:
    content = figure.properties()
    layout = content["layout"]
    width = PAGE_INCHES if figure.wide else COLUMN_INCHES
    handles = _legend(section, content["data"], int((width - HANDLE_INCHES) / CHARACTER_INCHES))
    lines = [line for handle in handles for line in str(handle.get_label()).splitlines()]
    widest = HANDLE_INCHES + CHARACTER_INCHES * max(map(len, lines), default=0)
    columns = max(1, int(width / widest))
    height = max(MIN_INCHES, figure.height / PIXELS_PER_INCH) + ENTRY_INCHES * -(
        -len(lines) // columns
    )
    drawn = make(figsize=(width, height), layout="constrained")
    axes = drawn.add_subplot()
    axes.grid(True)
    ends: dict[float, float] = {}
    for trace in content["data"]:
        if trace["type"] == "bar":
            _add_bars(axes, trace, layout, ends)
        else:
            _add_line(axes, trace)
    _set_axis(axes, "x", layout["xaxis"])
    _set_axis(axes, "y", layout["yaxis"])
    for shape in layout.get("shapes", ()):
        axes.axhline(shape["y0"], color=shape["line"]["color"], linewidth=0.6)
    if handles:
        options = {"handlelength": 1.4, "columnspacing": 1.0, "borderpad": 0, "frameon": False}
        drawn.legend(handles=handles, loc="outside upper left", ncols=columns, **options)
    return drawn


def _add_line(axes: Any, trace: Mapping[str, Any]) -> None:
    mode, look, marker = trace["mode"], trace.get("line", {}), trace.get("marker", {})
    x, y = _numbers(trace["x"]), _numbers(trace["y"])
    options: dict[str, Any] = {"alpha": trace.get("opacity", 1), "zorder": 3}
    if "lines" in mode:
        axes.plot(
            x,
            y,
            color=look["color"],
            linewidth=LINE_SCALE * look["width"],
            linestyle=DASHES.get(look.get("dash", ""), "-"),
            drawstyle="steps-post" if look.get("shape") == "hv" else "default",
            **options,
        )
    if spread := trace.get("error_y"):
        between = [spread["arrayminus"], spread["array"]]
        axes.errorbar(x, y, between, fmt="none", ecolor=spread["color"], elinewidth=0.8, capsize=2)
    if "markers" in mode:
        area = (LINE_SCALE * np.asarray(marker.get("size", 6), float)) ** 2
        axes.scatter(
            x,
            y,
            s=area,
            c=marker["color"],
            marker=SYMBOLS[marker.get("symbol", "circle")],
            linewidths=0,
            **{**options, "alpha": marker.get("opacity", options["alpha"])},
        )


def _add_bars(
    axes: Any, trace: Mapping[str, Any], layout: Mapping[str, Any], ends: dict[float, float]
) -> None:
    """Draw bars, those of a stack at the ends of the preceding ones."""
    from matplotlib.colors import to_rgba

    across = trace.get("orientation") == "h"
    lengths = _numbers(trace["x" if across else "y"])
    places = trace["y" if across else "x"]
    if len(places) and isinstance(places[0], str):
        labels = [*places]
        (axes.set_yticks if across else axes.set_xticks)(range(len(labels)), labels)
        places = range(len(labels))
    places = _numbers(places)
    base = np.asarray(trace.get("base", 0.0), float)
    if layout.get("barmode") == "stack":
        base = np.array([ends.get(place, 0.0) for place in places])
        ends.update(zip(places.tolist(), (base + np.nan_to_num(lengths)).tolist(), strict=True))
    marker = trace["marker"]
    thickness = trace.get("width", 1 - layout.get("bargap", 0.2))
    opacity = np.broadcast_to(marker.get("opacity", 1.0), lengths.shape)
    colours = [to_rgba(marker["color"], float(alpha)) for alpha in opacity]
    draw, start = (axes.barh, "left") if across else (axes.bar, "bottom")
    draw(places, lengths, thickness, **{start: base}, color=colours, linewidth=0, zorder=3)
    if trace.get("textposition") == "inside":
        middle = base + lengths / 2
        for place, centre, text in zip(places, middle, trace["text"], strict=True):
            point = (centre, place) if across else (place, centre)
            axes.text(*point, text, ha="center", va="center", fontsize=6, zorder=4)


def _set_axis(axes: Any, name: str, look: Mapping[str, Any]) -> None:
    """Set title, scale, ends and ticks of an axis from its properties for Plotly."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    axis, logarithmic = getattr(axes, f"{name}axis"), look.get("type") == "log"
    set_ends = getattr(axes, f"set_{name}lim")
    axis.set_label_text(look["title"]["text"])
    if logarithmic:
        getattr(axes, f"set_{name}scale")("log")
    if "range" in look:
        set_ends(*(10.0**end if logarithmic else end for end in look["range"]))
    elif look.get("rangemode") == "tozero" and not logarithmic:
        low, high = getattr(axes, f"get_{name}lim")()
        set_ends(min(0.0, low), high)
    if look.get("autorange") == "reversed":
        axis.set_inverted(True)
    if look.get("dtick") == "D2":  # 1, 2, 5, 10, ...
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    elif not logarithmic and (look.get("dtick") == 1 or look["title"]["text"] == "epoch"):
        axis.set_major_locator(MaxNLocator(integer=True))
    if "tickvals" in look:
        axis.set_ticks(look["tickvals"], [re.sub(r"<[^>]*>", "", t) for t in look["ticktext"]])
        axis.set_ticks([], minor=True)
    if not look.get("showgrid", True) or look.get("type") == "category":
        axis.grid(False)
    if look.get("ticks") == "":
        axis.set_tick_params(length=0)
    if "scaleanchor" in look:
        axes.set_aspect("equal")


def _legend(section: Section, data: Sequence[Mapping[str, Any]], characters: int) -> list[Any]:
    """Return the entries of the section's legend that a figure needs: none for one meaning.

    Names are in lines of at most so many characters.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = dict.fromkeys(str(trace["name"]) for trace in data if _is_visible(trace))
    if any(trace.get("line", {}).get("dash") for trace in data):  # of what, beside names of runs
        names |= dict.fromkeys({"training", "validation"} & {*section.legend})
    handles: list[Any] = []
    for entry, look in section.legend.items() if len(names) > 1 else ():
        if entry not in names:
            continue
        name = fill(entry, characters)
        colour, _, kind = look.partition(" ")
        if kind == "point":
            handles.append(Line2D([], [], color=colour, marker="o", ms=4, ls="", label=name))
        elif kind:
            style = DASHES.get(kind, "-")
            handles.append(Line2D([], [], color=colour, linewidth=1, ls=style, label=name))
        elif colour:
            handles.append(Patch(color=colour, linewidth=0, label=name))
    return handles


def _is_visible(trace: Mapping[str, Any]) -> bool:
    """Return whether bars have lengths, of which all may be 0."""
    lengths = trace["x" if trace.get("orientation") == "h" else "y"]
    return trace["type"] != "bar" or bool(np.nan_to_num(_numbers(lengths)).any())


def _numbers(values: Any) -> np.ndarray:
    """Return an array of float64, NaN where there is no value."""
    return np.array([np.nan if value is None else value for value in values], np.float64)
