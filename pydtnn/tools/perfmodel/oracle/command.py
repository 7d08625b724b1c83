"""The command line of the oracle."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from time import monotonic
from typing import Any

from pydtnn.cli.workload import names_in
from pydtnn.layers.collectives import PIPELINE
from pydtnn.tools.perfmodel.compute import AnalyticCosts
from pydtnn.tools.perfmodel.oracle import options, ranking, table
from pydtnn.tools.perfmodel.oracle.options import create_parser
from pydtnn.tools.perfmodel.oracle.paper import draw_paper
from pydtnn.tools.perfmodel.oracle.what_if import sweep
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.training.workload import Workload
from pydtnn.utils import plain_yaml
from pydtnn.utils.command import run_command
from pydtnn.utils.files import write_file

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


def _run(args: argparse.Namespace) -> None:
    if args.paper:
        draw_paper(args.paper, args.output, args.csv)
        return
    for name in ("model", "platform"):
        if getattr(args, name) is None:
            raise ValueError(f"the option --{name} is required; see python -m pydtnn oracle --help")
    ranks, variants = options.parse_ranks(args.ranks), options.variants_of(args)
    platform, work = Platform.load(args.platform), options.workload_of(args)
    costs = AnalyticCosts(platform, work.dtype, peaks_only=args.peaks_only)
    oracle = ranking.Oracle(Projector(work, platform, costs), args.batch_size)
    blocks = oracle.projector.blocks.shorter(work.along({PIPELINE: ranking.MAX_BLOCK_STAGES}), 0)
    stages = ranking.MAX_BLOCK_STAGES if blocks else ranking.MAX_STAGES
    limits = table.find_limits(work, oracle.projector.backend, stages)
    kinds = names_in(args.strategies)
    if kinds == [*ranking.KINDS]:  # those that divide layers of this network
        kinds = [limit.kind for limit in limits]

    def tried(number: int, variants: ranking.Variants = variants) -> Iterator[Workload]:
        return ranking.strategies(work, number, kinds, variants, most=args.axes, stages=stages)

    explained = options.axes_of("--explain", args.explain) if args.explain else {}
    note = platform.check_hosts(max(*ranks, prod(explained.values())))
    print(table.title(work, platform.name, args.batch_size))
    if note:
        print(f"note: {note}")
    if args.sweep:
        plain = replace(variants, recompute=False, sharded=False)
        fastest: dict[str, Workload] = {}
        for one in oracle.rank(tried(max(ranks), plain)):
            if one.projection is not None:
                fastest.setdefault(one.work.kind, one.work)
        sweeps = [sweep(axis, oracle, [*fastest.values()]) for axis in names_in(args.sweep)]
        print("\n\n".join("\n".join(table.of_sweep(one) + table.of_winners(one)) for one in sweeps))
        table.write(args.csv, [row for one in sweeps for row in one.rows()])
        return
    if args.search is not None:
        _print_search(oracle.projector, ranks, args.search)
        return
    if args.explain:
        _print_explanation(oracle.entry(replace(work, axes=explained)))
        return
    swept = {n: ranking.sort_entries(_shown(oracle, [*tried(n)], args)) for n in ranks}
    if args.explain is not None:
        _print_explanation(swept[max(ranks)][0])
        return
    _print(swept, args)
    print("\nlimits: beyond these ranks a strategy computes some layers on all ranks")
    limited = {*kinds} - ({"data"} if args.batch_size else set())
    print("\n".join(table.of_limits(one for one in limits if one.kind in limited)))
    table.write(args.csv, [one.to_json() for entries in swept.values() for one in entries])


def _shown(
    oracle: ranking.Oracle, works: Sequence[Workload], args: argparse.Namespace
) -> Iterator[ranking.Entry]:
    """Predict runs; every few seconds, write the fastest ones so far to the standard error."""
    found, written = list[ranking.Entry](), monotonic()
    every = bool(args.csv) or len(works) <= MANY
    entries = map(oracle.entry, works) if every else oracle.fastest(works, max(args.top, TOP))
    for number, entry in enumerate(entries, start=1):
        yield entry
        found = ranking.sort_entries([*found[:3], entry])
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


def _print(swept: Mapping[int, Sequence[ranking.Entry]], args: argparse.Namespace) -> None:
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    if args.top == 1 and len(swept) > 1:
        print("\n".join(table.of_best(swept, width)))
        return
    top = max(args.top, TOP) if len(swept) == 1 and args.top == 1 else args.top
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


def _print_explanation(entry: ranking.Entry) -> None:
    if entry.projection is None:
        raise ValueError(entry.reason)
    print("\n".join(table.explain(entry.projection)))
    if entry.reason:
        print(f"not possible: {entry.reason}")
    print(f"limited by: {entry.bottleneck}; efficiency {100 * entry.efficiency:.0f} %")
