"""Report of training runs as one HTML page: ``python -m pydtnn report --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pydtnn.tools.report.page import render
from pydtnn.tools.report.runs import read_runs
from pydtnn.utils.command import Parser, run_command
from pydtnn.utils.files import write_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; return the exit status, 0 on success.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """
    return run_command("report", lambda: _run(create_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> None:
    page = render(read_runs(options.runs, options.trace)).encode()
    write_file("report: --output", options.output, page)
    print(f"{options.output}: {len(page) / 1e6:.1f} MB")


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m pydtnn report",
        description="Write one HTML page with curves, times, configuration and environment of "
        "training runs. It contains everything it shows and opens without a network.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that a run printed")
    parser.removed["--figures"] = "the page saves each of its figures as SVG, by its camera button"
    parser.removed["--step"] = "pydtnn trace export FOLDER --to chrome draws all steps in Perfetto"
    text = "page to write (default: report.html)"
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help=text)
    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="FOLDER",
        help="trace of the first RUN; repeated, of the next ones (default: that of the run)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
