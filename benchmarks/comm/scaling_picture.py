"""The picture of a scaling run: throughput, speed-up, efficiency, communication."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.comm.scaling import Case, Row

COLORS = {"ours": "tab:blue", "torch": "tab:orange"}
LOOKS: dict[str, dict[str, Any]] = {
    "strong": {"linestyle": "-", "marker": "o"},
    "weak": {"linestyle": "--", "marker": "s", "markerfacecolor": "none"},
}


def draw(path: Path, title: str, rows: dict[Case, Row], published: tuple[int, float]) -> None:
    """Draw a PNG; `published` is a number of ranks and the speed-up reached elsewhere."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 3, figsize=(14, 8))
    figure.suptitle(title)
    *axes, key = grid.flat
    most = max(case.ranks for case in rows)
    for kind, side in dict.fromkeys((case.kind, case.side) for case in rows):
        chosen = [(case.ranks, row) for case, row in rows.items() if case[:2] == (kind, side)]
        ranks = [n for n, _ in chosen]
        look = {"color": COLORS[side], "label": f"{side}, {kind}", **LOOKS[kind]}
        for axis, intervals in (
            (axes[0], [row.rate for _, row in chosen]),
            (axes[1], [row.speedup for _, row in chosen]),
            (axes[2], [row.speedup.divided(n) for n, row in chosen]),
        ):
            means = [one.mean for one in intervals]
            reach = [
                [max(0.0, one.mean - one.low) for one in intervals],
                [min(one.high, 9 * one.mean) - one.mean for one in intervals],
            ]
            axis.errorbar(ranks, means, reach, capsize=3, **look)
        axes[3].plot(ranks, [100 * row.exposed for _, row in chosen], **look)
        axes[4].plot(ranks, [row.megabytes for _, row in chosen], **look)
    axes[1].plot([1, most], [1, most], "k:", label="ideal")
    axes[2].axhline(1.0, color="k", linestyle=":", label="ideal")
    n, speedup = published
    label = f"published: {speedup} times on {n} GPUs"
    axes[2].axhline(speedup / n, color="tab:green", label=label)
    axes[1].plot([1, most], [speedup / n, speedup / n * most], color="tab:green", label=label)
    key.axis("off")
    key.legend(*axes[1].get_legend_handles_labels(), loc="center", fontsize=11)
    titles = ("images/s", "speed-up", "efficiency", "exposed communication, %", "MB a rank sends")
    for axis, what in zip(axes, titles, strict=True):
        axis.set(title=what, xlabel="ranks", xticks=sorted({case.ranks for case in rows}))
        highest = max(float(max(line.get_ydata())) for line in axis.lines)
        axis.set_ylim(0, 1.2 * highest or 1)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
