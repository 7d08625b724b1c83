"""Report of training runs as one HTML page, or as figures: ``python -m pydtnn report --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pydtnn.tools.report.drawing import FORMATS, draw_figures
from pydtnn.tools.report.page import render, sections_of
from pydtnn.tools.report.runs import StepNumber, read_runs
from pydtnn.utils.command import printing
from pydtnn.utils.errors import EXPLAINED, describe, requested_traceback
from pydtnn.utils.files import write_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; return the exit status, 0 on success.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """
    options = create_parser().parse_args(arguments)
    try:
        runs, steps = read_runs(options.runs, options.trace), [*map(read_step, options.step)]
        if options.figures:
            sections = sections_of(runs, steps)
            paths = draw_figures(sections, options.output or "figures", options.figures)
            lines = [*map(str, paths)]
        else:
            page, output = render(runs, steps).encode(), options.output or "report.html"
            write_file("report: --output", output, page)
            lines = [f"{output}: {len(page) / 1e6:.1f} MB"]
        with printing():
            print("\n".join(lines))
    except EXPLAINED as error:
        print(f"{requested_traceback(error)}{describe(error)}", file=sys.stderr)
        return 1
    return 0


def read_step(text: str) -> StepNumber:
    """Return the step of "EPOCH:STEP".

    >>> read_step("0:12")
    StepNumber(epoch=0, number=12)
    """
    epoch, _, number = text.partition(":")
    if not (epoch.isdecimal() and number.isdecimal()):
        raise ValueError(f"report: --step: expected EPOCH:STEP, such as 0:12, got {text!r}")
    return StepNumber(int(epoch), int(number))


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pydtnn report",
        description="Write one HTML page with curves, times, configuration and environment of "
        "training runs. It contains everything it shows and opens without a network.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that a run printed")
    parser.add_argument(
        *("-o", "--output"),
        metavar="FILE",
        help="page, or folder of --figures (default: report.html, or figures)",
    )
    parser.add_argument(
        "--figures",
        choices=FORMATS,
        help="write each figure to a file for a paper instead: one column wide, with a legend and "
        "without a title",
    )
    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="FOLDER",
        help="trace of the first RUN; repeated, of the next ones (default: that of the run)",
    )
    parser.add_argument(
        "--step",
        action="append",
        default=[],
        metavar="EPOCH:STEP",
        help="step of the timeline; can be repeated (default: one of median duration)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
