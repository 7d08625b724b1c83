"""Parts of a page: sections with figures and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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

RUNS = (*("#C2185B", "#00838F", "#7CB342", "#8E24AA", "#795548", "#F06292", "#4DB6AC", "#C0CA33"),)
"""Colours of runs, which have no other meaning."""

FONT = "Inter, 'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"

AXIS = {"automargin": True, "showline": True, "ticks": "outside", "zeroline": False}
"""Properties of all axes; the script of the page adds colours, light or dark."""


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


def axis(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return the properties of an axis with a title, or with further properties."""
    given = {"title": given} if isinstance(given, str) else dict(given)
    title = given.pop("title", "")
    return {**AXIS, "title": {"text": title, "standoff": 8}, **given}


def colour(index: int) -> str:
    """Return the colour of a run by its number; they repeat after eight."""
    return RUNS[index % len(RUNS)]


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
