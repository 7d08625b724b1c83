"""ParaDL's projections from the command line: ``python -m benchmarks.paradl --help``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paradl.case import STRATEGIES, Case, Projection
from benchmarks.paradl.corrected import CORRECTIONS
from benchmarks.paradl.projection import FORMULAS, project, sweep
from benchmarks.paradl.text import read_network, read_platform, read_split
from pydtnn.tools.perfmodel.oracle.options import parse_ranks
from pydtnn.utils.command import Parser, add_value, run_command
from pydtnn.utils.files import write_file
from pydtnn.utils.names import unknown
from pydtnn.utils.tables import csv_of
from pydtnn.utils.units import align

EXAMPLES = """examples:
  python -m benchmarks.paradl alexnet.net --ranks 2-1024 --batch-size 512
  python -m benchmarks.paradl net.yaml --split filter.lc --strategies filter,channel \\
      --formulas printed --global-batch-size 512 --ranks 2,4,8
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, 0 on success.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """
    return run_command("", lambda: _run(create_parser().parse_args(arguments)))


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "python -m benchmarks.paradl",
        description="Project the training time of a network with the formulas of ParaDL (Kahira et "
        "al., 2021), as published and corrected.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("network", metavar="NETWORK", help="list of layers: .net or .yaml")
    text = "name, .yaml or .plat (default: abci)"
    parser.add_argument("--platform", default="abci", metavar="FILE", help=text)
    add_value(parser, "--split", "FILE", "which layers are divided (.lc)")
    text, everything = "comma-separated (default: all)", ",".join(STRATEGIES)
    parser.add_argument("--strategies", default=everything, metavar="NAMES", help=text)
    add_value(parser, "--formulas", "NAMES", f"of {', '.join(FORMULAS)}", "published,corrected")
    add_value(parser, "--ranks", "N", "1-1024 (powers of two) or 2,4", "2-64")
    add_value(parser, "--batch-size --batch-per-rank", "N", "samples per rank and step", 32)
    text = "instead: samples of all ranks per step"
    add_value(parser, "--global-batch-size --batch", "N", text, type=int)
    add_value(parser, "--parts", "N", "ranks of a group of a hybrid", type=int)
    add_value(parser, "--segments", "N", "of a pipeline's batch", 4)
    add_value(parser, "--output", "FILE", "write .json or .csv", type=Path)
    parser.add_argument("--corrections", action="store_true", help="list the corrections")
    return parser


def _run(options: argparse.Namespace) -> None:
    formulas = options.formulas.split(",")
    for name in formulas:
        if name not in FORMULAS:
            raise ValueError(f"--formulas: {unknown('formulas', name, FORMULAS)}")
    network, platform = read_network(options.network), read_platform(options.platform)
    if options.split:
        network = read_split(options.split, network)
    cases = [
        *sweep(
            network,
            platform,
            options.strategies.split(","),
            parse_ranks(options.ranks),
            per_rank=options.batch_size,
            batch=options.global_batch_size,
            parts=options.parts,
            segments=options.segments,
        )
    ]
    print(f"{network.name}: {network.samples} samples per epoch, platform {platform.name}")
    for line in table(cases, formulas):
        print(line)
    if options.corrections:
        print("\ncorrections:")
        for line in corrections():
            print(line)
    if options.output:
        _write(options.output, cases, formulas)


COLUMNS = ("memory/B", "compute/s", "messages/s", "epoch/s", "rank min")


def table(cases: Iterable[Case], formulas: Sequence[str]) -> list[str]:
    """Return the lines of a table: a row per case, for each of the formulas its columns.

    Parameters
    ----------
    cases : iterable of Case
    formulas : sequence of str
        Keys of `FORMULAS`.
    """
    blocks = [name if i == 0 else "" for name in formulas for i in range(len(COLUMNS))]
    rows = [["", "", "", *blocks, ""]]
    rows.append(["strategy", "ranks", "batch", *COLUMNS * len(formulas), "limit"])
    for case in cases:
        found = [project(case, name) for name in formulas]
        cells = [cell for one in found for cell in _cells(one)]
        name = case.strategy if case.groups == 1 else f"{case.strategy} {case.groups}x{case.parts}"
        rows.append([name, str(case.ranks), str(case.batch), *cells, _problem(found)])
    return align(rows, 1)


def corrections() -> list[str]:
    """Return a line per correction of the corrected formulas."""
    return align([[name, text] for name, text in CORRECTIONS.items()], 2)


def _problem(found: Sequence[Projection]) -> str:
    problems = {one.formulas: one.problem for one in found if one.problem}
    if len({*problems.values()}) == 1 and len(problems) == len(found):
        return found[0].problem
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items())


def _cells(one: Projection) -> list[str]:
    values = (one.memory, one.compute, one.communication, one.seconds)
    return [*(f"{value:.12g}" for value in values), str(one.cost)]


def _write(path: Path, cases: Sequence[Case], formulas: Sequence[str]) -> None:
    rows = [_row(case, name) for case in cases for name in formulas]
    if path.suffix == ".json":
        text = json.dumps(rows, indent=1) + "\n"
    elif path.suffix == ".csv":
        text = csv_of(rows)
    else:
        raise ValueError(f"--output: expected a name that ends in .json or .csv, got {path}")
    write_file("paradl: --output", path, text.encode())


def _row(case: Case, formulas: str) -> dict[str, Any]:
    found = project(case, formulas)
    own = {k: v for k, v in asdict(found).items() if k != "case"}
    about = {k: getattr(case, k) for k in ("strategy", "ranks", "batch", "groups", "segments")}
    return {**about, **own, "seconds": found.seconds, "cost": found.cost, "problem": found.problem}
