"""The page of the study: tables of medians with their confidence intervals, and plots."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.checkpoints import scale
from benchmarks.common.pages import beginning, median, table

Records = Sequence[dict[str, Any]]


def show(values: Iterable[float], scale: float = 1e3) -> str:
    """Return a median and its interval, in ms by default."""
    return median(values).text(scale)


def groups(records: Records, *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return records by the values of some keys, in the order of the first ones."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in keys), []).append(record)
    return found


def cells(own: Records) -> list[str]:
    """Return times, MB, MB of memory to write and to read, and the number of some records."""
    times = [show(record[what] for record in own) for what in ("write", "read", "blocked")]
    memory = [f"{np.median([r[what] for r in own]):.1f}" for what in ("memory", "reading")]
    return [*times, f"{own[0]['bytes'] / 1e6:.2f}", *memory, str(len(own))]


def summary(records: Records) -> str:
    """Return times in ms, with their intervals, as text."""
    lines = []
    times = [record for record in records if record["what"] == "time"]
    for key, own in groups(times, "network", "ranks", "place", "format").items():
        write, read, waits, size, _, _, turns = cells(own)
        lines.append(
            f"{key[0]:9} {key[1]} {key[2]:6} {key[3]:16} {size:>7} MB  "
            f"write {write:28} read {read:28} waits {waits:28} n={turns}"
        )
    return "\n".join(lines)


def create(records: Records, about: Sequence[str]) -> str:
    """Return the page."""
    times = [record for record in records if record["what"] == "time"]
    content = [record for record in records if record["what"] == "bytes"]
    flips = [record for record in records if record["what"] == "flip"]
    parts = [
        beginning("Checkpoints"),
        "<h1>Checkpoints: a study</h1><pre>",
        html.escape("\n".join(about)),
        "</pre>",
    ]
    for (network, place), own in groups(times, "network", "place").items():
        parts.append(f"<h2>{network}, {place}</h2>")
        parts.append(bars(own))
        some = groups(own, "ranks", "format").items()
        rows = [[name, ranks, *cells(found)] for (ranks, name), found in some]
        head = (
            "format", "ranks", "write, ms", "read, ms", "a step waits, ms", "MB", "write: MB",
            "read: MB", "turns",
        )  # fmt: skip
        parts.append(table(head, rows))
    if content:
        parts.append("<h2>Bytes and damage</h2>")
        rows = [
            [
                r["format"], r["network"], "yes" if r["same"] else "no", f"{r['ratio']:.3f}",
                ", ".join(f"{n} {what}" for what, n in sorted(r["flips"].items())), r["cut"],
                r["error"],
            ]
            for r in content
        ]  # fmt: skip
        head = ("format", "network", "same bytes", "deflate", "flipped bits", "cut", "its error")
        parts.append(table(head, rows))
    if flips:
        parts.append("<h2>A flipped bit, and training that resumes from it</h2>")
        rows = []
        for r in flips:
            ended = len(r["before"]) - len(r["after"])
            after = (show(r["after"], 1), f"{min(r['after']):.4g}") if r["after"] else ("", "")
            rows.append([r["place"], r["bit"], show(r["before"], 1), *after, ended])
        head = ("where", "bit", "accuracy at once", "after more steps", "lowest", "loss not finite")
        parts.append(table(head, rows))
    parts.append(f"<h2>{scale.RANKS:,} ranks, by the performance model</h2>")
    for name, nbytes in (("205 MB (ResNet-50)", 205e6), ("12 GB", 12e9), ("2.1 TB", 2.1e12)):
        shares = scale.shares(nbytes)
        rows = [
            [level, *(f"{100 * s.share:.2f} % ({s.interval:.0f} s)" for s in own.values())]
            for level, own in shares.items()
        ]
        parts += [f"<h3>{name}</h3>", table(("level", *scale.INTERVALS), rows)]
    return "\n".join(parts)


def bars(records: Records) -> str:
    """Return a plot of times by format and ranks, as SVG; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    names = [*dict.fromkeys(record["format"] for record in records)]
    ranks = [*dict.fromkeys(record["ranks"] for record in records)]
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), ("write", "read"), strict=True):
        for number, size in enumerate(ranks):
            found = [
                median(
                    [r[what] for r in records if (r["format"], r["ranks"]) == (name, size)] or [0]
                )
                for name in names
            ]
            middle, low, high = 1e3 * np.array(found).T
            place = np.arange(len(names)) + number * 0.8 / len(ranks)
            errors = np.nan_to_num([middle - low, high - middle])
            axes.barh(place, middle, 0.8 / len(ranks), xerr=errors, label=f"{size} ranks")
        axes.set_yticks(np.arange(len(names)) + 0.4, names)
        axes.set_xscale("log")
        axes.set_xlabel(f"{what}, ms")
    figure.axes[0].legend(fontsize=7)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue().partition("<svg")[1] + out.getvalue().partition("<svg")[2]
