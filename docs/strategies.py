"""Draw the strategies: ``python docs/strategies.py docs/pictures/strategies.png``."""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

RANKS = ("#4c78a8", "#f58518")
WHOLE = "#d9d9d9"
"""Colour of arrays that every rank has."""

Split = tuple[str, str]
"""How an array is cut, "samples", "rows", "channels", "filters" or "whole", and its label."""


def block(axes: Axes, x: float, y: float, cut: str, label: str, *, weights: bool = False) -> None:
    """Draw an array of two ranks: maps as (channels to the right, rows downwards), twice."""
    width, height = (0.9, 0.9) if weights else (1.3, 0.8)
    for sample in range(1 if weights else 2):
        left, top = x + 0.16 * sample, y + 0.95 * sample
        parts = {
            "whole": [(0, 0, 1, 1, WHOLE)],
            "samples": [(0, 0, 1, 1, RANKS[sample])],
            "rows": [(0, 0.5, 1, 0.5, RANKS[0]), (0, 0, 1, 0.5, RANKS[1])],
            "filters": [(0, 0.5, 1, 0.5, RANKS[0]), (0, 0, 1, 0.5, RANKS[1])],
            "channels": [(0, 0, 0.5, 1, RANKS[0]), (0.5, 0, 0.5, 1, RANKS[1])],
            "partial": [(0, 0, 1, 1, RANKS[0]), (0.06, 0.1, 1, 1, RANKS[1])],
            "first": [(0, 0, 1, 1, RANKS[0])],
            "second": [(0, 0, 1, 1, RANKS[1])],
        }[cut]
        for dx, dy, w, h, colour in parts:
            place = (left + dx * width, top + dy * height)
            size = (w * width, h * height)
            axes.add_patch(Rectangle(place, *size, facecolor=colour, edgecolor="white", alpha=0.85))
    axes.text(x + width / 2, y - 0.28, label, ha="center", va="center", fontsize=8)


ROWS: dict[str, tuple[Split, Split, Split, str]] = {
    "data": (
        ("samples", "x: samples"),
        ("whole", "w: whole"),
        ("samples", "y: samples"),
        "sum of dw",
    ),
    "spatial": (
        ("rows", "x: rows"),
        ("whole", "w: whole"),
        ("rows", "y: rows"),
        "halo of x and dy,\nsum of dw",
    ),
    "filter": (
        ("whole", "x: whole"),
        ("filters", "w: filters"),
        ("channels", "y: channels"),
        "gather of y,\nsum of dx",
    ),
    "channel": (
        ("channels", "x: channels"),
        ("channels", "w: channels"),
        ("partial", "y: partial sums"),
        "sum of y,\ngather of dy",
    ),
    "pipeline": (
        ("first", "layers 1 to k"),
        ("whole", "y of layer k"),
        ("second", "layers k + 1 to n"),
        "y and dy of\nmicro-batches",
    ),
}


def main() -> None:
    """Draw one row per strategy."""
    figure, axes = plt.subplots(figsize=(7.4, 8.6))
    for row, (name, (x, w, y, messages)) in enumerate(ROWS.items()):
        top = -2.9 * row
        axes.text(-1.6, top + 0.9, name, fontsize=12, weight="bold", va="center")
        block(axes, 0.2, top, *x)
        axes.text(2.0, top + 0.9, "x" if name != "pipeline" else "", fontsize=12, va="center")
        block(axes, 2.5, top + 0.4, *w, weights=True)
        axes.text(3.7, top + 0.9, "=" if name != "pipeline" else "", fontsize=12, va="center")
        block(axes, 4.3, top, *y)
        axes.text(6.4, top + 0.9, messages, fontsize=10, va="center")
    for rank, colour in enumerate(RANKS):
        axes.add_patch(Rectangle((0.2 + 2 * rank, 2.5), 0.4, 0.3, facecolor=colour))
        axes.text(0.7 + 2 * rank, 2.65, f"rank {rank}", fontsize=9, va="center")
    axes.add_patch(Rectangle((4.2, 2.5), 0.4, 0.3, facecolor=WHOLE))
    axes.text(4.7, 2.65, "every rank", fontsize=9, va="center")
    axes.text(6.4, 2.65, "messages", fontsize=10, weight="bold", va="center")
    axes.set_xlim(-1.7, 8.4)
    axes.set_ylim(-2.9 * (len(ROWS) - 1) - 0.7, 3.0)
    axes.axis("off")
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
