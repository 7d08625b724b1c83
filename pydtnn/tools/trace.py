"""Traces of training: ``python -m pydtnn trace --help`` exports, imports, compares, replays."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from pydtnn.comm import Communicator
from pydtnn.tools.tracing import command
from pydtnn.utils import clock
from pydtnn.utils.command import Parser, run_subcommand
from pydtnn.utils.units import align


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments; return the exit status, see `run_subcommand`."""
    return run_subcommand("pydtnn trace", create_parser(), arguments)


def create_parser() -> Parser:
    """Return the parser of the command line."""
    return command.create_parser(add_replay, add_import)


def add_replay(commands: Any) -> None:
    """Add the command that predicts, which alone loads the performance model."""
    replay = commands.add_parser("replay", help="print the time of a step on other networks")
    replay.add_argument("folder", help="folder of --trace")
    replay.add_argument("--platform", required=True, metavar="NAMES", help="names, or YAML files")
    replay.add_argument("--bandwidth", default="", metavar="FACTORS", help="on it, such as 2,0.5")
    replay.add_argument("--allreduce", default="", metavar="NAMES", help="other algorithms of sums")
    replay.add_argument(
        "--without",
        nargs="?",
        const="",
        metavar="RANKS",
        help="let these ranks compute as long as the others; without RANKS, those that are slow",
    )
    replay.set_defaults(command=_replay)


def _replay(options: argparse.Namespace) -> None:
    from pydtnn.tools.perfmodel.platform import Platform
    from pydtnn.tools.perfmodel.replay import what_if
    from pydtnn.tools.tracing import load_timeline

    factors = _numbers("--bandwidth", options.bandwidth, float)
    without = None if options.without is None else _numbers("--without", options.without, int)
    lines = what_if(
        load_timeline(options.folder),
        [Platform.load(name) for name in options.platform.split(",")],
        bandwidths=factors,
        allreduces=[name for name in options.allreduce.split(",") if name],
        without=None if without is None else tuple(without),
    )
    print("\n".join(lines))


def add_import(commands: Any) -> None:
    """Add the command that executes the traces of other programs."""
    command = commands.add_parser("import", help="print the time of other programs' traces")
    command.add_argument("files", nargs="+", help="a file of each rank")
    command.add_argument("--format", required=True, choices=["chakra"], help="of the files")
    command.add_argument("--platform", required=True, metavar="NAME", help="name, or a YAML file")
    command.set_defaults(command=_import)


def _import(options: argparse.Namespace) -> None:
    from pydtnn.tools.perfmodel.compute.base import NoCosts
    from pydtnn.tools.perfmodel.platform import Platform
    from pydtnn.tools.perfmodel.virtual.clock import RankClock
    from pydtnn.tools.perfmodel.virtual.run import Processor, run_virtual
    from pydtnn.tools.tracing.chakra import read_nodes
    from pydtnn.tools.tracing.execution import execute, groups_of

    platform, ranks = Platform.load(options.platform), read_nodes(options.files)
    groups, network = groups_of(ranks), platform.network(len(ranks))

    def program(comm: Communicator) -> tuple[float, float]:
        own = clock.current()
        assert isinstance(own, RankClock)
        return execute(comm, ranks, groups, own.spend)

    try:
        processor = Processor.of(platform)
        run = run_virtual(program, network=network, costs=NoCosts(), processor=processor)
    except RuntimeError as error:
        raise ValueError(f"trace import: the nodes of the ranks do not match: {error}") from error
    hosts = len({*network.hosts})
    print(
        f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {hosts} host{'s' * (hosts > 1)} of "
        f"{platform.name}: {1e3 * max(seconds for seconds, _ in run.results):.6g} ms"
    )
    rows = [["", "nodes", "time", "computing", "rest"]]
    for rank, (seconds, computed) in enumerate(run.results):
        times = (seconds, computed, seconds - computed)
        parts = [f"{1e3 * one:.6g} ms" for one in times]
        rows.append([f"rank {rank}", f"{len(ranks[rank]):,}", *parts])
    print("\n".join(align(rows, 1)))
    idle = sum(
        bool(node.attributes.get("num_ops")) and not node.duration
        for nodes in ranks
        for node in nodes
    )
    if idle:
        print(f"{idle:,} nodes with operations have no duration and take no time")


def _numbers(who: str, text: str, kind: Any) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",") if part]
    except ValueError:
        found = [-1]
    if any(not 0 <= one < float("inf") or (kind is float and not one) for one in found):
        raise ValueError(f"{who}: expected numbers separated by commas, got {text!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
