"""Allreduce schedules from the command line: ``python -m pydtnn comm --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydtnn.comm.schedules import SCHEDULES, Algorithm, find
from pydtnn.tools.schedules.allreduce_picture import count, draw, text, title
from pydtnn.tools.schedules.check import ScheduleError, associations, check
from pydtnn.utils.command import Parser, run_subcommand

EXAMPLES = """examples:
  python -m pydtnn comm list
  python -m pydtnn comm draw ring -np 8
  python -m pydtnn comm draw hierarchical --hosts 4x2 --output hierarchical.pdf
  python -m pydtnn comm check path/to/file.py:my_algorithm -np 1-17
"""

MAX_RANKS = 1024
"""Maximum number of ranks; listing larger schedules takes minutes."""

MAX_ORDERED = 64
"""Maximum number of ranks for which the order of additions is printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments; return the exit status, see `run_subcommand`."""
    return run_subcommand("pydtnn comm", create_parser(), arguments)


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "python -m pydtnn comm",
        description="List, draw and check allreduce schedules.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="{list,draw,check}", required=True)

    command = commands.add_parser("list", help="list the schedules with descriptions")
    command.set_defaults(command=_list)

    command = commands.add_parser("draw", help="show the messages of every round")
    command.set_defaults(command=_draw)
    _add_ranks(command, "number of ranks (default: 8)")
    command.add_argument(
        "--output", type=Path, metavar="FILE", help="draw a picture (png, pdf, svg) instead of text"
    )

    command = commands.add_parser("check", help="prove that every rank gets the sum")
    command.set_defaults(command=_check)
    _add_ranks(command, "number of ranks (default: 8), or a range such as 1-17")
    return parser


def _add_ranks(command: argparse.ArgumentParser, meaning: str) -> None:
    command.add_argument("name", metavar="NAME", help="a schedule, or path/to/file.py:function")
    command.add_argument("-np", metavar="P", help=meaning)
    command.add_argument(
        "--hosts",
        metavar="HxM",
        help="H hosts of M ranks, or the ranks of each host as in 2,1,2 (default: one host)",
    )


def _list(options: argparse.Namespace) -> None:
    width = max(map(len, SCHEDULES))
    for name, algorithm in SCHEDULES.items():
        print(f"{name:<{width}}  {(algorithm.__doc__ or '').partition(chr(10))[0]}")


def _draw(options: argparse.Namespace) -> None:
    name, algorithm = _algorithm(options.name)
    hosts, *more = _layouts(options)
    if more:
        raise ValueError(f"-np must be one number, got {options.np}; draw one schedule at a time")
    done = check(algorithm, hosts)
    if options.output:
        draw(options.output, name, done, hosts)
    else:
        print(text(name, done, hosts))


def _check(options: argparse.Namespace) -> None:
    name, algorithm = _algorithm(options.name)
    for hosts in _layouts(options):
        try:
            done = check(algorithm, hosts)
        except ScheduleError as error:
            raise ValueError(f"{name} of {count(len(hosts), 'rank')}: {error}") from error
        print(f"correct: {title(name, done, hosts)}{_order(algorithm, hosts)}", flush=True)


def _order(algorithm: Algorithm, hosts: Sequence[int]) -> str:
    """Describe the order in which contributions are added."""
    if not 1 < len(hosts) <= MAX_ORDERED:
        return ""
    orders = associations(algorithm, hosts)
    if len(orders) > 1:
        return f"; parts are added in {len(orders)} orders"
    return f"; all is added as {next(iter(orders))}"


def _algorithm(name: str) -> tuple[str, Algorithm]:
    """Return name and function of a schedule of the library or of the user."""
    return name.rpartition(":")[2], find(name)


def _layouts(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the host of each rank, for each requested number of ranks."""
    if options.hosts is not None:
        hosts = _hosts(options.hosts)
        if options.np not in (None, str(len(hosts))):
            raise ValueError(
                f"-np must be {len(hosts)} as --hosts {options.hosts} has "
                f"{count(len(hosts), 'rank')}, got {options.np}; omit one of them"
            )
        return [hosts]
    first, dash, last = (options.np or "8").partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise ValueError(f"-np must be a number of ranks or a range as in 1-17, got {options.np}")
    sizes = range(int(first), int(last or first) + 1)
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= MAX_RANKS:
        raise ValueError(
            f"-np must be from 1 to {MAX_RANKS}, the smaller number first, got {options.np}"
        )
    return [(0,) * size for size in sizes]


def _hosts(given: str) -> tuple[int, ...]:
    """Return the host of each rank: "2x3" is (0, 0, 0, 1, 1, 1), "2,1" is (0, 0, 1)."""
    hosts, x, ranks = given.partition("x")
    each = [ranks] * int(hosts) if x and hosts.isdecimal() else given.split(",")
    if not each or not all(number.isdecimal() and int(number) > 0 for number in each):
        raise ValueError(
            f"--hosts must be hosts x ranks as in 4x2, or ranks as in 2,1,2, got {given}"
        )
    if sum(map(int, each)) > MAX_RANKS:
        raise ValueError(f"--hosts must have at most {MAX_RANKS} ranks, got {given}; use fewer")
    return tuple(host for host, number in enumerate(each) for _ in range(int(number)))


if __name__ == "__main__":
    sys.exit(main())
