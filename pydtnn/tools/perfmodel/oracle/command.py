"""The command line of the oracle."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from time import monotonic
from typing import Any

from pydtnn.layers.collectives import PIPELINE
from pydtnn.tools.perfmodel import fields
from pydtnn.tools.perfmodel.compute import AnalyticCosts
from pydtnn.tools.perfmodel.oracle import table
from pydtnn.tools.perfmodel.oracle.options import (
    axes_of,
    create_parser,
    names_of,
    parse_ranks,
    variants_of,
    workload_of,
)
from pydtnn.tools.perfmodel.oracle.paper import PARTS, Paper, on_virtual_ranks
from pydtnn.tools.perfmodel.oracle.paper_figure import draw, error_of
from pydtnn.tools.perfmodel.oracle.ranking import (
    KINDS,
    MAX_BLOCK_STAGES,
    MAX_STAGES,
    Entry,
    Oracle,
    Variants,
    best,
    first_of_kinds,
    sort_entries,
    strategies,
)
from pydtnn.tools.perfmodel.oracle.what_if import Sweep, sweep
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.schedules.figures import check_figure, save_figure
from pydtnn.training.workload import Workload
from pydtnn.utils import plain_yaml
from pydtnn.utils.command import run_command
from pydtnn.utils.files import write_file
from pydtnn.utils.tables import csv_of

TOP = 10
"""Strategies that are shown of a single number of ranks."""

WIDTH = 160
"""Columns where the output is not a terminal."""

MANY = 500
"""Strategies of a number of ranks up to which all are followed."""

PROGRESS_SECONDS = 5
"""Time between two tables of what has been predicted so far."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, 0 on success.

    Errors are printed in one line on the standard error, with PYDTNN_TRACEBACK=1 after the
    traceback.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """
    return run_command("pydtnn oracle", lambda: _run(create_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> None:
    if options.paper:
        _draw_paper(options)
        return
    for name in ("model", "platform"):
        if getattr(options, name) is None:
            raise ValueError(f"the option --{name} is required; see python -m pydtnn oracle --help")
    ranks, variants = parse_ranks(options.ranks), variants_of(options)
    platform, work = Platform.load(options.platform), workload_of(options)
    costs = AnalyticCosts(platform, work.dtype, peaks_only=options.peaks_only)
    oracle = Oracle(Projector(work, platform, costs), options.batch_size)
    blocks = oracle.projector.blocks.shorter(work.along({PIPELINE: MAX_BLOCK_STAGES}), 0)
    stages = MAX_BLOCK_STAGES if blocks else MAX_STAGES
    limits = table.find_limits(work, oracle.projector.backend, stages)
    kinds = names_of(options.strategies)
    if kinds == [*KINDS]:  # those that divide layers of this network
        kinds = [limit.kind for limit in limits]

    def tried(number: int, variants: Variants = variants) -> Iterator[Workload]:
        return strategies(work, number, kinds, variants, most=options.axes, stages=stages)

    explained = axes_of(options.explain) if options.explain else {}
    note = platform.check_hosts(max(*ranks, prod(explained.values())))
    print(table.title(work, platform.name, options.batch_size))
    if note:
        print(f"note: {note}")
    if options.sweep:
        plain = replace(variants, recompute=False, sharded=False)
        found = first_of_kinds(oracle.rank(tried(max(ranks), plain)))
        fastest = [one.work for one in found.values()]
        sweeps = [sweep(axis, oracle, fastest) for axis in names_of(options.sweep)]
        print("\n\n".join("\n".join(table.of_sweep(one) + table.of_winners(one)) for one in sweeps))
        _write([row for one in sweeps for row in one.rows()], options)
        return
    if options.search is not None:
        _print_search(oracle.projector, ranks, options.search)
        return
    if options.explain:
        _print_explanation(oracle.entry(replace(work, axes=explained)))
        return
    swept = {number: sort_entries(_shown(oracle, [*tried(number)], options)) for number in ranks}
    if options.explain is not None:
        chosen = best(swept[max(ranks)])
        _print_explanation(chosen or swept[max(ranks)][0])
        return
    _print(swept, options)
    print("\nlimits: beyond these ranks a strategy computes some layers on all ranks")
    limited = {*kinds} - ({"data"} if options.batch_size else set())
    print("\n".join(table.of_limits(one for one in limits if one.kind in limited)))
    rows = [entry.to_json() for entries in swept.values() for entry in entries]
    _write(rows, options)


def _shown(
    oracle: Oracle, works: Sequence[Workload], options: argparse.Namespace
) -> Iterator[Entry]:
    """Predict runs; every few seconds, write the fastest ones so far to the standard error."""
    found, written = list[Entry](), monotonic()
    every = bool(options.csv) or len(works) <= MANY
    entries = map(oracle.entry, works) if every else oracle.fastest(works, max(options.top, TOP))
    for number, entry in enumerate(entries, start=1):
        yield entry
        found = sort_entries([*found[:3], entry])
        if monotonic() - written > PROGRESS_SECONDS:
            written = monotonic()
            text = f"{number} of {len(works)} strategies for {entry.work.ranks} ranks, so far:"
            rows = table.ranking([one for one in found[:3] if one.possible], WIDTH)
            print(text, *rows, "", sep="\n", file=sys.stderr, flush=True)


def _print_search(projector: Projector, ranks: Sequence[int], path: str) -> None:
    from pydtnn.tools.perfmodel.choice import search_lines

    plan: Any = None
    for number in sorted(ranks):
        found, lines = search_lines(projector, number)
        plan = found.best.work.plan
        print("\n".join([*lines, ""]))
    if path and plan is None:
        print(f"{path} was not written: a uniform plan is the best one")
    elif path:
        write_file("--search", path, plain_yaml.dump(plan).encode() + b"\n")
        print(f"plan: {path}")


def _print(swept: Mapping[int, Sequence[Entry]], options: argparse.Namespace) -> None:
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    if options.top == 1 and len(swept) > 1:
        print("\n".join(table.of_best(swept, width)))
        chosen = [one for entries in swept.values() if (one := best(entries))]
        if chosen:
            fastest = min(chosen, key=lambda one: one.projection.epoch if one.projection else 0)
            print(f"\nfastest: {fastest.work.strategy}, {fastest.work.ranks} ranks")
        return
    top = max(options.top, TOP) if len(swept) == 1 and options.top == 1 else options.top
    for ranks, entries in swept.items():
        possible = [entry for entry in entries if entry.possible]
        if possible:
            print("\n".join(table.ranking(possible[:top], width)))
        bounds = [entry.least for entry in entries if entry.least]
        if bounds:
            least = table.duration(min(bounds))
            print(f"{ranks} ranks: {len(bounds)} more take at least {least} by bounds (all: --csv)")
        others = [entry for entry in entries if not entry.possible and not entry.least]
        if others:
            print(f"{ranks} ranks: {len(others)} more are not possible, such as:")
            for entry in others[: 3 if possible else top]:
                print(f"  {entry.work.strategy}: {entry.reason}"[: max(width, 80)])


def _print_explanation(entry: Entry) -> None:
    if entry.projection is None:
        raise ValueError(entry.reason)
    print("\n".join(table.explain(entry.projection)))
    if entry.reason:
        print(f"not possible: {entry.reason}")
    print(f"limited by: {entry.bottleneck}; efficiency {100 * entry.efficiency:.0f} %")


def _draw_paper(options: argparse.Namespace) -> None:
    file = options.paper
    output = options.output or Path(f"{file.stem}.png")
    check_figure("oracle", output)
    paper = fields.read(Paper, fields.load("oracle", file), file.name)
    named, first = not paper.platform.endswith((".yaml", ".yml")), paper.works[0]
    platform = Platform.load(paper.platform if named else file.parent / paper.platform)
    costs = AnalyticCosts.of(first, platform)
    oracle = Oracle(Projector(replace(first, axes={}), platform, costs), paper.batch_per_rank)
    limits = paper.limits(oracle.projector.backend)
    head = table.title(first, platform.name, paper.batch_per_rank)
    if any(values for axis, values in vars(paper.axes).items() if axis != "ranks"):
        head += f", {first.ranks} ranks"
    print(paper.title, head, sep="\n")
    sweeps: list[Sweep] = []
    for axis, values in vars(paper.axes).items():
        if values:
            found = sweep(axis, oracle, paper.works, values)
            sweeps.append(found := on_virtual_ranks(found, paper.virtual, costs))
            shown = table.of_sweep(
                found, paper.draw.replace(PARTS, table.QUANTITIES[0]), paper.notes
            )
            print("", *shown, *error_of(found), sep="\n", flush=True)
    if paper.draw == PARTS:
        print("\nlimits:", *table.of_limits(limits.values()), sep="\n")
    _write([row for one in sweeps for row in one.rows()], options)
    save_figure("oracle", output, partial(draw, paper, head, sweeps, limits))
    print(f"\npicture: {output}")


def _write(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    if options.csv:
        write_file("oracle", options.csv, csv_of(rows).encode())
