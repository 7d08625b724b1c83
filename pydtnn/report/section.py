"""Parts of a page: sections with figures and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
"""Colours of runs and series that colour-blind readers can distinguish (Okabe and Ito, 2008)."""

GREY = "#8a8a8a"
"""Colour of references, such as ideal scaling, and of time without a name."""

FONT = "Inter, 'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"

AXIS = {
    "automargin": True,
    "gridcolor": "#e6e6e6",
    "linecolor": "#444444",
    "showline": True,
    "tickcolor": "#444444",
    "ticks": "outside",
    "zeroline": False,
}
"""Properties of all axes."""


@dataclass
class Figure:
    """A figure for Plotly.

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
            "font": {"family": FONT, "size": 13, "color": "#222222"},
            "height": self.height,
            "hovermode": "closest",
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.02,
                "yanchor": "bottom",
                "traceorder": "normal",
            },
            "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
            "paper_bgcolor": "#ffffff",
            "plot_bgcolor": "#ffffff",
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
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    differing: Sequence[int] = ()
    folded: bool = False
    numbers: bool = False


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
        Colours of the figures by their meaning, above all figures.
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
    """Return the colour of a series by its number; they repeat after eight."""
    return COLOURS[index % len(COLOURS)]


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
