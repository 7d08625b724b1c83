"""Pages of studies: tables, and medians with their confidence intervals."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
"""Of intervals."""

RESAMPLINGS = 2000

MIN_VALUES = 3
"""Values of an interval; fewer have none."""

_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>body{{font-family:sans-serif;max-width:75em;margin:2em auto;padding:0 1em}}
div{{overflow-x:auto}}table{{border-collapse:collapse}}svg{{max-width:100%;height:auto}}
td,th{{padding:.2em .5em;text-align:right;border-bottom:1px solid #ddd;vertical-align:top}}
td:first-child,th:first-child{{text-align:left}}li{{overflow-wrap:anywhere}}
pre{{background:#f4f4f2;padding:1em;white-space:pre-wrap}}
@media(max-width:40em){{td{{min-width:6em}}
td:first-child,th:first-child{{position:sticky;left:0;background:#fff;min-width:0}}}}</style>
"""


class Interval(NamedTuple):
    """A value with its confidence interval, whose ends are NaN if there are too few values."""

    value: float
    low: float
    high: float

    def text(self, scale: float = 1.0) -> str:
        """Return it with four digits, as "12.3 (12.1 to 12.6)", or "12.3" without an interval."""
        value, low, high = (scale * one for one in self)
        return f"{value:.4g}" + (f" ({low:.4g} to {high:.4g})" if low == low else "")


def median(values: Iterable[float]) -> Interval:
    """Return the median, with an interval by the bootstrap (percentiles of resampled medians).

    Fewer than three values have no interval.
    """
    own = np.array([*values])
    if len(own) < MIN_VALUES:
        return Interval(float(np.median(own)), np.nan, np.nan)
    drawn = np.random.default_rng(0).choice(own, (RESAMPLINGS, len(own)))
    rest = 50 * (1 - LEVEL)
    low, high = np.percentile(np.median(drawn, axis=1), [rest, 100 - rest])
    return Interval(float(np.median(own)), float(low), float(high))


def beginning(title: str) -> str:
    """Return the beginning of a page."""
    return _HEAD.format(title=title)


def table(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a table."""
    lines = []
    for tag, row in (("th", columns), *(("td", row) for row in rows)):
        cells = "".join(f"<{tag}>{html.escape(str(one))}</{tag}>" for one in row)
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join(["<div><table>", *lines, "</table></div>"])
