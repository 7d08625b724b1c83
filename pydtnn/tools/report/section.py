"""Parts of a page: sections with figures and tables."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

COLOURS = {
    "compute": "#3B5998",
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "loss": "#CC79A7",
    "update": "#009E73",
    "communication": "#D55E00",
    "waiting for a rank": "#F4B183",
    "message in flight": "#D9CB1E",
    "data": "#E69F00",
    "evaluation": "#A67C52",
    "callbacks": "#9575CD",
    "memory": "#607D8B",
    "other": "#8A8A8A",
}
"""Colour of each meaning on the page; the first ones are those of Okabe and Ito (2008)."""

RUN_COLOURS = (
    *("#C2185B", "#00838F", "#7CB342", "#8E24AA", "#795548", "#F06292", "#4DB6AC", "#C0CA33"),
)
"""Colours of runs, which have no other meaning."""

FONT = "Inter, 'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"

AXIS = {"automargin": True, "showline": True, "ticks": "outside", "zeroline": False}
"""Properties of all axes; the script of the page adds colours, light or dark."""

AXIS_OF_ROWS = {"autorange": "reversed", "ticks": "", "showgrid": False}
"""Properties of the axis of bars that are rows, of which the first is on top."""


@dataclass
class Figure:
    """A figure for Plotly, without a legend: that of its section is beside the figures.

    Attributes
    ----------
    title, caption : str
    data : sequence of dict
        Traces of Plotly.
    x, y : dict or str
        Properties of the axes, or their titles.
    height : int
        In CSS pixels.
    wide : bool
        Whether the figure needs the whole width of the page.
    layout : dict
        Further properties of the layout.
    """

    title: str
    data: Sequence[Mapping[str, Any]]
    x: Mapping[str, Any] | str
    y: Mapping[str, Any] | str
    caption: str = ""
    height: int = 340
    wide: bool = False
    layout: Mapping[str, Any] = field(default_factory=dict)

    def properties(self) -> dict[str, Any]:
        """Return the content for Plotly: "data" and "layout"."""
        layout = {
            "xaxis": axis(self.x),
            "yaxis": axis(self.y),
            "font": {"family": FONT, "size": 13},
            "height": self.height,
            "hovermode": "closest",
            "showlegend": False,
            "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
            **self.layout,
        }
        return {"data": list(self.data), "layout": layout}

    def json(self) -> str:
        """Return the same as JSON that can be part of a page's script."""
        return compact(self.properties()).replace("<", "\\u003c")


@dataclass
class Table:
    """A table.

    Attributes
    ----------
    title : str
    columns : sequence of str
    rows : sequence of sequence of str
        The first cell of a row is its name.
    differing : collection of int
        Rows that are highlighted.
    folded : bool
        Whether the reader has to unfold it.
    numbers : bool
        Whether cells besides the first are aligned to the right.
    sortable : bool
        Whether the reader can sort the rows by a column.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    differing: Sequence[int] = ()
    folded: bool = False
    numbers: bool = False
    sortable: bool = False

    @classmethod
    def of(cls, title: str, records: Sequence[Mapping[str, str]], **options: Any) -> Table:
        """Return a table with a row for each record, whose keys are the columns."""
        rows = [[*record.values()] for record in records]
        return cls(title, [*records[0]], rows, sortable=True, **options)


@dataclass
class Section:
    """A section of a page.

    Attributes
    ----------
    name : str
        Target of links.
    title, text : str
    figures : sequence of Figure
    tables : sequence of Table
    legend : dict
        Colours of the figures by their meaning, which is the name of the traces of Plotly. After
        the colour, the symbol if it is not an area: "line", "dash", "dot" or "point".
    absent : str
        If it has neither: the sentence with what is missing and how to obtain it.
    """

    name: str
    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    legend: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self.figures and not self.tables


@dataclass(frozen=True)
class SectionSource:
    """What sections show of a run.

    Attributes
    ----------
    of : callable
        Returns the content of a run for these sections; None, or another false value, if it has
        none.
    why_absent : callable
        Returns why no run has it, and how to obtain it.
    """

    of: Callable[[Any], Any]
    why_absent: Callable[[Sequence[Any]], str]


def section(
    name: str, title: str, source: SectionSource, text: str = ""
) -> Callable[[Callable[..., None]], Callable[..., Section]]:
    """Return a decorator of the function that fills a section.

    The function is called with a section that has a text, and pairs of each run that has the
    content of the source, and this content. It becomes one that returns the section of runs, with
    the reason if there are no such runs. Further arguments are passed on.
    """

    def decorate(fill: Callable[..., None]) -> Callable[..., Section]:
        @functools.wraps(fill)
        def build(runs: Sequence[Any], *options: Any) -> Section:
            contents = [(run, content) for run in runs if (content := source.of(run))]
            if not contents:
                return Section(name, title, absent=source.why_absent(runs))
            result = Section(name, title, text)
            fill(result, contents, *options)
            return result

        return build

    return decorate


def line(
    name: str,
    x: Any,
    y: Any,
    colour: str,
    template: str = "",
    *,
    extra: str = "",
    width: float = 1.8,
    **look: Any,
) -> dict[str, Any]:
    """Return a line for Plotly.

    Parameters
    ----------
    name : str
    x, y : sequence of float
    colour : str
    template : str
        Of the text of a point, by default its name and coordinates; `extra` is beside it.
    extra : str
    width : float
        In CSS pixels.
    **look
        Further properties, such as "dash".
    """
    return {
        **({"hovertemplate": f"{template}<extra>{extra}</extra>"} if template else {}),
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "line": {"color": colour, "width": width, **look},
    }


def stacked_bars(
    title: str,
    places: Sequence[Any],
    parts: Mapping[str, Sequence[float]],
    values: Mapping[str, Any] | str,
    across: Mapping[str, Any] | None = None,
    caption: str = "",
    *,
    unit: str = "ms",
    place: str = "%{x}",
    gap: float = 0.3,
    height: int | None = None,
    **options: Any,
) -> Figure:
    """Return a figure with a bar at each place, which consists of parts.

    Parameters
    ----------
    title : str
    places : sequence
        Names or numbers.
    parts : mapping of str to sequence of float
        For each meaning (`COLOURS`) the lengths at all places.
    values : mapping or str
        Axis of the lengths.
    across : mapping, optional
        Axis of the places, from left to right; without it the bars are rows, of which the first is
        on top.
    caption : str
    unit : str
        Of the lengths.
    place : str
        Template of the name of a place.
    gap : float
        Distance of the bars, relative to that of their centres.
    height : int, optional
        Of the figure; by default for the number of rows.
    **options
        Of the figure.
    """
    ends = [values, across or AXIS_OF_ROWS]
    along, beside, place = ("y", "x", place) if across else ("x", "y", "%{y}")
    data = [
        {
            **({} if across else {"orientation": "h"}),
            "type": "bar",
            "name": name,
            along: lengths,
            beside: places,
            "marker": {"color": COLOURS[name]},
            "hovertemplate": f"{place}, {name}: %{{{along}:.4g}} {unit}<extra></extra>",
        }
        for name, lengths in parts.items()
    ]
    height = height or (340 if across else 70 + 28 * max(2, len(places)))
    layout = {"barmode": "stack", "bargap": gap}
    x, y = reversed(ends) if across else ends
    return Figure(title, data, x, y, caption, height, layout=layout, **options)


def spread_places(values: Sequence[float], count: int) -> list[int]:
    """Return the places of at most `count` values: all, or some from the smallest to the largest.

    >>> spread_places([5.0, 1.0, 2.0, 4.0], 2), spread_places([2.0, 1.0], 2)
    ([0, 1], [0, 1])
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    if len(order) > count:
        order = [order[index * (len(order) - 1) // (count - 1)] for index in range(count)]
    return sorted(order)


def every(count: int, limit: int) -> int:
    """Return the distance of places of which at most `limit` are shown."""
    return -(-count // limit)


def axis(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return the properties of an axis with a title, or with further properties."""
    given = {"title": given} if isinstance(given, str) else dict(given)
    title = given.pop("title", "")
    return {**AXIS, "title": {"text": title, "standoff": 8}, **given}


def colour(index: int) -> str:
    """Return the colour of a run by its number; they repeat after eight."""
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def compact(value: Any) -> str:
    """Return JSON in which floats have six digits, and null where they are not finite.

    >>> compact({"x": np.array([1, 2]), "y": [0.1 + 0.2, np.nan]})
    '{"x":[1,2],"y":[0.3,null]}'
    """
    return json.dumps(_rounded(value), separators=(",", ":"), allow_nan=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value
