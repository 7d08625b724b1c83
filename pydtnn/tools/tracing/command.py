"""The command line of traces: export, summary, compare, flight."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pydtnn.tools.tracing.exports import FORMATS
from pydtnn.tools.tracing.flight import describe_flights, read_flights
from pydtnn.tools.tracing.summary import describe_changes, summarize
from pydtnn.tools.tracing.timeline import load_timeline
from pydtnn.utils.command import Parser, run_subcommand, subcommands

EXAMPLES = """examples:
  python -m pydtnn.train --model resnet20 --trace traces/run
  python -m pydtnn trace summary traces/run
  python -m pydtnn trace export traces/run --to chrome --output run.json
  python -m pydtnn trace compare traces/run traces/other
  python -m pydtnn trace flight runs/resnet20-synthetic-1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments; return the exit status, see `run_subcommand`."""
    return run_subcommand("pydtnn trace", create_parser(), arguments)


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser, commands = subcommands(
        "pydtnn trace", "Export, summarise and compare traces that --trace has written.", EXAMPLES
    )
    parser.removed["replay"] = (
        "training with --virtual-ranks, or python -m pydtnn oracle --sweep bandwidth, predicts a "
        "step on other networks"
    )
    export = commands.add_parser("export", help="write a trace in the format of another tool")
    export.add_argument("folder", help="folder of --trace")
    export.add_argument(
        "--to",
        "--format",
        required=True,
        choices=FORMATS,
        help="chrome: JSON for ui.perfetto.dev; paraver",
    )
    export.add_argument("--output", help="file; default: in the folder")
    export.set_defaults(command=_export)
    summary = commands.add_parser("summary", help="print where time went")
    summary.add_argument("folder", help="folder of --trace")
    summary.add_argument("--top", type=_rows, default=12, help="rows of each table; default: 12")
    summary.set_defaults(command=_summary)
    compare = commands.add_parser("compare", help="print what is slower or faster in a second run")
    compare.add_argument("before", help="folder of --trace")
    compare.add_argument("after", help="folder of --trace of the second run")
    compare.add_argument("--top", type=_rows, default=25, help="rows of the table; default: 25")
    compare.set_defaults(command=_compare)
    flight = commands.add_parser("flight", help="print where the ranks of a failed run have parted")
    flight.add_argument("folder", help="folder of the run")
    last = "activities of ranks that are late; default: 8"
    flight.add_argument("--last", type=_rows, default=8, help=last)
    flight.set_defaults(command=_flight)
    return parser


def _rows(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number of rows from 1, got {text!r}")
    return int(text)


def _export(options: argparse.Namespace) -> None:
    write, name = FORMATS[options.to]
    path = Path(options.output or Path(options.folder) / name)
    timeline = load_timeline(options.folder)
    write(timeline, path)
    records = len(timeline.activities)
    messages = timeline.messages
    print(f"{path}: {records:,} activities and {len(messages):,} messages")
    alone = len(messages.unmatched_sent) + len(messages.unmatched_received)
    if alone:
        print(f"{alone:,} messages were recorded by one of their ranks only and are not drawn")


def _summary(options: argparse.Namespace) -> None:
    print("\n".join(summarize(load_timeline(options.folder), top=options.top)))


def _flight(options: argparse.Namespace) -> None:
    print("\n".join(describe_flights(read_flights(options.folder), options.last)))


def _compare(options: argparse.Namespace) -> None:
    before, after = load_timeline(options.before), load_timeline(options.after)
    print("\n".join(describe_changes(before, after, top=options.top)))
