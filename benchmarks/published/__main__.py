"""Predictions beside published measurements.

    python -m benchmarks.published                          # means by source and device
    python -m benchmarks.published --rows narayanan2021     # each row of sources, or all
    python -m benchmarks.published --figure published.png
    python -m benchmarks.published --regret narayanan2021   # the authors' meshes beside all others
    python -m benchmarks.published --fit A100               # fits the numbers of a device again

A row has the measured and the predicted time of a step in seconds, and the error of the latter,
relative to the former. Rows on which the numbers of a device were fitted have a star, those that
are not certain (`Published.left_out`) a question mark. Means are those of absolute values. New
sources were entered when the model was complete, before anything was predicted for them. Rows that
are off by more than 15 % are listed with what is known of the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.common.report import Report
from benchmarks.published import meshes
from benchmarks.published.predict import FITTED, Compared, compare, fit, kernels_of, reason_of
from benchmarks.published.rows import Published, all_rows
from pydtnn.utils.units import align

LARGE = 0.15
"""Errors above it are listed."""


def mean_and_worst(rows: Sequence[Compared]) -> list[str]:
    """Return how many rows there are, their mean absolute error, and the largest one."""
    if not rows:
        return ["0", "", ""]
    errors = [one.error for one in rows]
    return [
        str(len(rows)),
        f"{100 * mean(map(abs, errors)):.1f} %",
        f"{100 * max(errors, key=abs):+.1f} %",
    ]


def summary(rows: Sequence[Compared], kind: str, name: Callable[[Compared], str]) -> Iterator[str]:
    """Yield a table of errors by source or device, fitted and held-out rows apart."""
    names = dict.fromkeys(map(name, rows))
    groups = [(one, [row for row in rows if name(row) == one]) for one in names]
    groups.append(("all but new", [one for one in rows if not one.row.unseen]))
    groups.append(("certain", [one for one in rows if not (one.row.unseen or one.row.left_out)]))
    groups.append(("new", [one for one in rows if one.row.unseen]))
    lines = [[kind, "fitted", "mean", "worst", "held out", "mean", "worst"]]
    for title, own in groups:
        halves = (
            [row for row in own if row.row.fitted is is_fitted] for is_fitted in (True, False)
        )
        lines.append([title, *(text for half in halves for text in mean_and_worst(half))])
    yield from align(lines, left=1)


def numbers() -> Iterator[str]:
    """Yield the fitted numbers of each device."""
    devices = {kernels_of(row).device: kernels_of(row) for row in all_rows()}
    lines = [["device", *FITTED, "units"]]
    for name, own in devices.items():
        times = (f"{1e6 * one:.3g} us" for one in (own.fill, own.launch))
        lines.append([name, f"{own.products:.3g}", f"{own.memory:.3g}", *times, str(own.units)])
    yield from align(lines, left=1)


def listed(rows: Sequence[Compared]) -> Iterator[str]:
    """Yield each row."""
    lines = [["source", "row", "devices", "measured s", "predicted s", "error"]]
    for one in rows:
        row, star = one.row, "*" * one.row.fitted + "?" * bool(one.row.left_out)
        times = f"{row.seconds:.4g}", f"{one.predicted:.4g}", f"{100 * one.error:+.1f} %{star}"
        lines.append([row.source, row.row, str(row.devices), *times])
    yield from align(lines, left=2)


def far_off(rows: Sequence[Compared]) -> Iterator[str]:
    """Yield the rows with large errors, by what is known of the reason."""
    reasons: dict[str, list[Compared]] = {}
    for one in rows:
        if abs(one.error) > LARGE:
            reasons.setdefault(one.row.left_out or reason_of(one.row), []).append(one)
    count = sum(map(len, reasons.values()))
    yield f"off by more than {100 * LARGE:.0f} %: {count} of {len(rows)} rows"
    for reason, own in reasons.items():
        yield f"{reason}:"
        yield "  " + ", ".join(f"{r.row.source} {r.row.row} {100 * r.error:+.0f} %" for r in own)


def regrets(rows: Sequence[Published]) -> Iterator[str]:
    """Yield how much slower than the fastest mesh that of each row is, by the predictions."""
    lines = [["row", "devices", "mesh", "regret", "fastest of", "", "memory"]]
    for row in rows:
        regret, best, number = meshes.regret(row)
        sizes = " and ".join(f"{meshes.memory(one) / 1e9:.0f}" for one in (row, best)) + " GB"
        texts = f"{100 * regret:.1f} %", str(number), meshes.name(best), sizes
        lines.append([row.row, str(row.devices), meshes.name(row), *texts])
    yield from align(lines, left=3)


def draw(rows: Sequence[Compared], path: Path) -> None:
    """Draw predicted over measured times."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 6.0), layout="constrained")
    for number, source in enumerate(dict.fromkeys(one.row.source for one in rows)):
        own = [one for one in rows if one.row.source == source]
        color = pyplot.get_cmap("tab20")(number % 20)
        for fitted in (False, True):
            some = [one for one in own if one.row.fitted is fitted]
            axes.loglog(
                [one.row.seconds for one in some],
                [one.predicted for one in some],
                "s" if fitted else "^" if own[0].row.unseen else "o",
                color=color,
                markerfacecolor="none" if fitted else color,
                markersize=4,
                label="" if fitted else source,
            )
    ends = [0.05, 5000.0]
    axes.loglog(ends, ends, color="black", linewidth=0.8)
    for factor in (1.3, 1 / 1.3):
        axes.loglog(ends, [factor * end for end in ends], ":", color="grey", linewidth=0.8)
    axes.set(xlabel="measured step (s)", ylabel="predicted step (s)", xlim=ends, ylim=ends)
    axes.legend(fontsize=6, title="squares: fitted; triangles: new; dots: 30 %", title_fontsize=6)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", nargs="*", metavar="SOURCE", help="print the rows of sources")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw predicted over measured")
    parser.add_argument("--fit", metavar="DEVICE", help="print the numbers that fit its rows best")
    text = "compare the meshes of its transformers with all others"
    parser.add_argument("--regret", metavar="SOURCE", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the tables there, too")
    given = parser.parse_args(arguments)
    if given.regret:
        print("\n".join(regrets([row for row in all_rows() if row.source == given.regret])))
        return
    if given.fit:
        own = [row for row in all_rows() if kernels_of(row).device == given.fit]
        found = fit([row for row in own if row.fitted])
        print({name: getattr(found, name) for name in FITTED})
        return
    rows = [compare(row) for row in all_rows()]
    report = Report(given.output)
    tables = [
        numbers(),
        summary(rows, "source", lambda one: one.row.source),
        summary(rows, "device", lambda one: kernels_of(one.row).device),
        far_off(rows),
    ]
    if given.rows is not None:
        chosen = [one for one in rows if one.row.source in (given.rows or {one.row.source})]
        tables.insert(0, listed(chosen))
    for table in tables:
        report.line()
        for line in table:
            report.line(line)
    if given.figure:
        draw(rows, given.figure)


if __name__ == "__main__":
    main()
