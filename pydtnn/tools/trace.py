"""Traces of training: ``python -m pydtnn trace --help`` exports, compares, replays."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from pydtnn.tools.tracing import command
from pydtnn.utils.command import Parser, run_subcommand


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments; return the exit status, see `run_subcommand`."""
    return run_subcommand("pydtnn trace", create_parser(), arguments)


def create_parser() -> Parser:
    """Return the parser of the command line."""
    return command.create_parser(add_replay)


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
