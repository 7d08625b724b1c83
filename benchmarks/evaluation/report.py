"""The report of an evaluation: tables in Markdown and HTML, and figures."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.pages import LEVEL, MIN_VALUES, beginning, median, table
from benchmarks.evaluation import observations, statistics, traces
from benchmarks.evaluation.frameworks import FRAMEWORKS
from benchmarks.evaluation.networks import NETWORKS, parameters
from benchmarks.evaluation.plan import Plan
from pydtnn.tools.schedules.figures import PALETTE, save_figure
from pydtnn.utils.files import write_file

CHECKED = 10
"""First steps whose losses are compared."""

PAIRS = (11, 15, 30)
"""Numbers of pairs of which a long plan's comparisons are counted."""

_TESTS = (
    f"p: exact test over the signs of the pairs' differences, from {statistics.MIN_PAIRS} pairs "
    f"on; n pairs have a p of at least 2 / 2^n; * p < {statistics.SIGNIFICANT:g}; detectable: the "
    f"smallest ratio that has a star with a probability of {100 * statistics.POWER:g} % when times "
    "vary as here, '-' if the pairs are too few for any; intervals have "
    f"{100 * LEVEL:g} %, from {MIN_VALUES} runs on"
)

Runs = Sequence[Mapping[str, Any]]

Table = tuple[str, Sequence[str], list[Sequence[str]]]
"""A title, the head of the columns, and rows."""


def create(folder: Path, plan: Plan, runs: Runs, about: Sequence[str]) -> list[Path]:
    """Write report.md, report.html and the figures; return the paths."""
    good = [run for run in runs if "error" not in run]
    tables = [
        *_times(plan, good),
        _together(plan, good),
        _losses(plan, good),
        scaling(plan, good),
        _variation(plan, good),
        _adapters(plan, good),
        *_parts(folder, plan, runs),
        _absent(plan),
    ]
    if plan.epochs:
        tables.insert(0, _accuracy(plan, good))
    if plan.repetitions >= 2 * max(PAIRS):
        tables.append(_power(plan, good))
    if failed := [run for run in runs if "error" in run]:
        names = ("framework", "network", "ranks", "repetition", "error")
        rows = [[str(run[name]) for name in names] for run in failed]
        tables.append(("Runs that failed", names, rows))
    notes = [*_incomplete(plan, runs), *about, *_disturbed(plan, good), _energy(good), _TESTS]
    figures = [_figure(folder, plan, good, network) for network in plan.networks]
    text = ["# Frameworks compared", "", *(f"- {note}" for note in notes)]
    page = [beginning("Frameworks compared"), "<h1>Frameworks compared</h1>", "<ul>"]
    page += [f"<li>{html.escape(note)}</li>" for note in notes] + ["</ul>"]
    for title, columns, rows in tables:
        text += ["", f"## {title}", "", *_markdown(columns, rows)]
        page += [f"<h2>{html.escape(title)}</h2>", table(columns, rows)]
    for path in figures:
        text += ["", f"![times of steps]({path.name})"]
        page.append(path.read_text())
    paths = [folder / "report.md", folder / "report.html"]
    write_file("evaluation", paths[0], ("\n".join(text) + "\n").encode())
    write_file("evaluation", paths[1], ("\n".join(page) + "\n").encode())
    return [*paths, *figures]


def step_of(run: Mapping[str, Any], plan: Plan) -> float:
    """Return the median time of a run's steps, in s."""
    return quantile_of(run, plan, 0.5)


def quantile_of(run: Mapping[str, Any], plan: Plan, part: float) -> float:
    """Return a quantile of the times of a run's steps, in s."""
    return float(np.quantile(run["times"][plan.warm_up :], part))


def select(runs: Runs, **which: Any) -> list[Mapping[str, Any]]:
    """Return runs with these values."""
    return [run for run in runs if all(run[name] == value for name, value in which.items())]


def paired(
    runs: Runs, plan: Plan, first: str, second: str, **which: Any
) -> tuple[list[float], list[float]]:
    """Return the times of steps of two frameworks in the repetitions that both have.

    They are lower quartiles of runs: what else happens on a machine only adds to the time of some
    steps, and to the median when it lasts.
    """
    sides = [
        {
            (run["repetition"], run["network"], run["ranks"]): quantile_of(run, plan, 0.25)
            for run in select(runs, framework=name, **which)
        }
        for name in (first, second)
    ]
    keys = [key for key in sides[0] if key in sides[1]]
    return [sides[0][key] for key in keys], [sides[1][key] for key in keys]


def _times(plan: Plan, runs: Runs) -> list[Table]:
    reference = plan.frameworks[0]
    columns = (
        *("framework", "ms per step", f"time / {reference}'s", "p", "detectable"),
        *("samples/s", "start-up s", "MB per rank", "KB sent", "messages"),
        *(("KB by a host's link",) if plan.link else ()),
    )
    found: list[Table] = []
    for network in plan.networks:
        for ranks in plan.ranks:
            rows = []
            for name in plan.frameworks:
                own = select(runs, framework=name, network=network, ranks=ranks)
                if not own:
                    continue
                step = median(step_of(run, plan) for run in own)
                pair = paired(runs, plan, name, reference, network=network, ranks=ranks)
                compared = ["", "", ""]
                if name != reference and pair[0]:
                    compared = _compared([pair])
                start, memory = (
                    np.median([run[what] for run in own]) for what in ("start_up", "memory")
                )
                sent = [_middle(own, "bytes", 1e3), _middle(own, "messages")]
                sent += [_middle(own, "link_bytes", 1e3)] if plan.link else []
                rate = ranks * plan.batch_of(ranks) / step.value
                rows.append(
                    [FRAMEWORKS[name].title, step.text(1e3), *compared, f"{rate:.4g}"]
                    + [f"{start:.1f}", f"{memory / 1e6:.0f}", *sent]
                )
            size = parameters(NETWORKS[network]) / 1e6
            title = f"{network} ({size:.2f} M parameters), {_ranks(plan, ranks)}"
            found.append((title, columns, rows))
    return found


def _ranks(plan: Plan, ranks: int) -> str:
    """Describe a number of ranks, and on how many hosts they are."""
    text = f"{ranks} rank{'s' * (ranks > 1)}"
    hosts = plan.hosts_of(ranks)
    return text + (f" on {hosts} host{'s' * (hosts > 1)}, {plan.link}" if plan.link else "")


def _middle(runs: Runs, name: str, unit: float = 1.0) -> str:
    known = [run[name] for run in runs if run[name] is not None]
    return f"{np.median(known) / unit:.0f}" if known else "-"


def _together(plan: Plan, runs: Runs) -> Table:
    reference, rows = plan.frameworks[0], []
    for name in plan.frameworks[1:]:
        cells = [
            paired(runs, plan, name, reference, network=network, ranks=ranks)
            for network, ranks in product(plan.networks, plan.ranks)
        ]
        if cells := [pair for pair in cells if pair[0]]:
            pairs = sum(len(pair[0]) for pair in cells)
            rows.append([FRAMEWORKS[name].title, *_compared(cells), str(pairs)])
    title = "All networks and ranks together"
    return title, ("framework", f"time / {reference}'s", "p", "detectable", "pairs"), rows


def _compared(cells: Sequence[tuple[list[float], list[float]]]) -> list[str]:
    """Return a ratio, its p, and the ratio that such a comparison could have found."""
    found, least = statistics.compare_cells(cells), statistics.detectable(cells)
    p = f"{found.p:.2g}" if found.pairs >= statistics.MIN_PAIRS else "-"
    ratio = found.ratio.text() + (" *" if found.significant else "")
    return [ratio, p, f"{least:.3f}" if np.isfinite(least) else "-"]


def _power(plan: Plan, runs: Runs) -> Table:
    """Compare in groups of repetitions, as often as the plan has them."""
    reference, rows = plan.frameworks[0], []
    for network, ranks, name in product(plan.networks, plan.ranks, plan.frameworks[1:]):
        times = paired(runs, plan, name, reference, network=network, ranks=ranks)
        for size in PAIRS:
            starts = range(0, len(times[0]) - size + 1, size)
            found = [statistics.compare(*(own[i : i + size] for own in times)) for i in starts]
            if found:
                count = sum(one.significant for one in found)
                least = statistics.detectable([times], size)
                own = [network, str(ranks), FRAMEWORKS[name].title, str(size)]
                rows.append([*own, f"{count} of {len(found)}", f"{least:.3f}"])
    columns = ("network", "ranks", "framework", "pairs", "significant", "detectable")
    return f"Comparisons with {reference} of so many repetitions", columns, rows


def loss_differences(plan: Plan, runs: Runs) -> list[tuple[str, int, str, float]]:
    """Return for each network, ranks and framework the largest difference of its first losses.

    It is that to the median of the frameworks, relative to it.
    """
    found = []
    for network in plan.networks:
        for ranks in plan.ranks:
            losses = {
                name: np.array(own[0]["losses"][:CHECKED])
                for name in plan.frameworks
                if (own := select(runs, framework=name, network=network, ranks=ranks))
            }
            if losses:
                middle = np.median([*losses.values()], axis=0)
                for name, own in losses.items():
                    found.append((network, ranks, name, float(np.max(abs(own / middle - 1)))))
    return found


def _losses(plan: Plan, runs: Runs) -> Table:
    rows = [
        [network, str(ranks), FRAMEWORKS[name].title, f"{value:.1e}"]
        for network, ranks, name, value in loss_differences(plan, runs)
    ]
    title = f"Losses of the first {CHECKED} steps: largest relative difference to the median"
    return title, ("network", "ranks", "framework", "difference"), rows


def scaling(plan: Plan, runs: Runs) -> Table:
    """Return the efficiency on more ranks; those that share a core can have its share only."""
    least, rows = min(plan.ranks), []
    for network in plan.networks:
        for name in plan.frameworks:
            cells = []
            for ranks in plan.ranks:
                share = least / ranks if plan.strong else 1.0
                few = select(runs, framework=name, network=network, ranks=least)
                many = select(runs, framework=name, network=network, ranks=ranks)
                pairs = [
                    step_of(a, plan)
                    / step_of(b, plan)
                    * max(b["sharing"] / a["sharing"], 1)
                    * share
                    for a in few
                    for b in many
                    if a["repetition"] == b["repetition"]
                ]
                cells.append(median(pairs).text(100) if pairs else "-")
            rows.append([network, FRAMEWORKS[name].title, *cells])
    kind = "Strong" if plan.strong else "Weak"
    title = f"{kind} scaling: efficiency in % of {least} rank{'s' * (least > 1)}"
    if most := max((run["sharing"] for run in runs if run["sharing"] > 1), default=None):
        title += f"; where up to {most:g} ranks share a core, in % of their share of it"
    return title, ("network", "framework", *map(str, plan.ranks)), rows


def _variation(plan: Plan, runs: Runs) -> Table:
    """All frameworks that run with all numbers of ranks, logarithms of the times of steps."""
    least = min(
        (len(select(runs, framework=f, network=n, ranks=r)) for f in plan.frameworks
         for n in plan.networks for r in plan.ranks if FRAMEWORKS[f].runs_on(r)),
        default=0,
    )  # fmt: skip
    cells = {
        (name, network, str(ranks)): [np.log(step_of(run, plan)) for run in own[:least]]
        for name in plan.frameworks
        if all(map(FRAMEWORKS[name].runs_on, plan.ranks))
        for network in plan.networks
        for ranks in plan.ranks
        if (own := select(runs, framework=name, network=network, ranks=ranks))
    }
    try:
        shares = statistics.variation(cells, ("framework", "network", "ranks")) if cells else {}
    except ValueError:
        shares = {}
    rows = [[name, f"{100 * share:.2f}"] for name, share in shares.items()]
    return "Variation of the times of steps (logarithms) by factor", ("factor", "%"), rows


def _adapters(plan: Plan, runs: Runs) -> Table:
    rows = []
    for name in plan.frameworks:
        own = select(runs, framework=name)
        version = own[0]["version"] if own else "-"
        source = own[0]["counted_by"] if own else "-"
        rows.append([FRAMEWORKS[name].title, version, str(FRAMEWORKS[name].lines()), source])
    return "Adapters", ("framework", "version", "lines of code", "messages counted by"), rows


def _parts(folder: Path, plan: Plan, runs: Runs) -> Iterator[Table]:
    """Yield the traced steps: what they consist of, the mean of all ranks."""
    for network, ranks, chosen in traces.find(folder, plan, runs):
        rows = [traces.cells(*one) for one in chosen.items()]
        yield f"Traced steps of {network}, {_ranks(plan, ranks)}", traces.HEADS, rows


def _absent(plan: Plan) -> Table:
    """Return the frameworks that pip cannot install and the plan does not have, and why."""
    rows = [
        [one.title, one.reason]
        for name, one in FRAMEWORKS.items()
        if one.reason and name not in plan.frameworks
    ]
    return "Not compared", ("framework", "reason"), rows


def _incomplete(plan: Plan, runs: Runs) -> list[str]:
    """Return how many runs have a result, if not all have."""
    good, planned = sum("error" not in run for run in runs), sum(1 for _ in plan.cells())
    failed = f", {len(runs) - good} failed" if good < len(runs) else ""
    return [f"incomplete: {good} of {planned} runs{failed}"] if good < planned else []


def _disturbed(plan: Plan, runs: Runs) -> list[str]:
    if not plan.disturbed:
        return ["runs beside other programs were not repeated"]
    repeated = sum(run["repeated"] for run in runs)
    still = sum(run["disturbed"] for run in runs)
    return [
        f"{repeated} runs were repeated because of other programs; {still} of the last tries too"
    ]


def _energy(runs: Runs) -> str:
    known = [joules for run in runs if (joules := observations.energy(run)) is not None]
    if not known:
        return "the energy of the processor (RAPL) cannot be read on this machine"
    return (
        f"energy of the processor in a run: {median(known).text()} J; each in {observations.TABLE}"
    )


def _accuracy(plan: Plan, runs: Runs) -> Table:
    """Return what is reached after all epochs over seeds, and the time of steps to the target."""
    rows = []
    for network, ranks, name in product(plan.networks, plan.ranks, plan.frameworks):
        own = select(runs, framework=name, network=network, ranks=ranks)
        own = [run for run in own if run["accuracy"]]
        if own:
            times = [observations.time_to(run, plan.target) for run in own]
            reached = [seconds for seconds in times if seconds is not None]
            rows.append(
                [network, str(ranks), FRAMEWORKS[name].title]
                + [statistics.mean(run["accuracy"][-1] for run in own).text(100)]
                + [f"{len(reached)} of {len(own)}", median(reached).text() if reached else "-"]
            )
    seeds = f"seeds that reach {100 * plan.target:g} %"
    columns = ("network", "ranks", "framework", "%", seeds, "s of training until then")
    return f"Accuracy on the test set of {plan.data} after {plan.epochs} epochs", columns, rows


def _figure(folder: Path, plan: Plan, runs: Runs, network: str) -> Path:
    """Draw the times of all steps of a network: a point for each, and the median."""

    def draw(make: Any) -> Any:
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        inches = 0.32 * len(plan.frameworks) * len(plan.ranks)
        height = inches + 0.7
        figure = make(figsize=(7.2, height))
        axes = figure.add_axes((0.3, 0.55 / height, 0.66, inches / height))
        labels, rng = [], np.random.default_rng(0)
        for ranks in plan.ranks:
            for color, name in zip(cycle(PALETTE), plan.frameworks, strict=False):
                own = select(runs, framework=name, network=network, ranks=ranks)
                if not own:
                    continue
                times = 1e3 * np.concatenate([run["times"][plan.warm_up :] for run in own])
                place = len(labels)
                spread = place + rng.uniform(-0.25, 0.25, len(times))
                axes.plot(times, spread, ".", ms=2, color=color, alpha=0.5)
                axes.plot([np.median(times)] * 2, [place - 0.35, place + 0.35], color="#222222")
                labels.append(f"{FRAMEWORKS[name].title}, {ranks}")
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # 1, 2, 5, 10, ...
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())  # whose labels would overlap
        axes.set_xlabel(f"time of a step (ms), {network}; bars: medians")
        return figure

    path = folder / f"steps-{network}.svg"
    save_figure("evaluation", path, draw)
    return path


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
