"""Pipeline schedules from the command line: ``python -m pydtnn model.pipeline --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydtnn.model.pipeline.check import check, steady_bubble
from pydtnn.model.pipeline.schedules import PIPELINE_SCHEDULES, find
from pydtnn.tools.schedules.pipeline_picture import draw, text, title
from pydtnn.utils.command import Parser, run_command

EXAMPLES = """examples:
  python -m pydtnn model.pipeline draw 1f1b
  python -m pydtnn model.pipeline draw gpipe --ranks 3 --output gpipe.pdf
  python -m pydtnn model.pipeline check path/to/file.py:my_schedule --ranks 4
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, 0 on success.

    Errors are printed in one line on the standard error, with PYDTNN_TRACEBACK=1 after the
    traceback.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """
    name = "pydtnn model.pipeline"
    return run_command(name, lambda: _run(create_parser().parse_args(arguments)))


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "python -m pydtnn model.pipeline",
        description="Draw and check pipeline schedules.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("draw", "check"), help="show it, or prove it")
    parser.add_argument(
        "name", metavar="NAME", help=f"{', '.join(PIPELINE_SCHEDULES)} or path/to/file.py:function"
    )
    for name, usual in (("ranks", 4), ("micro-batches", 8), ("steps", 1)):
        parser.add_argument(
            f"--{name}", type=int, default=usual, metavar="N", help=f"default: {usual}"
        )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="draw a picture (png, pdf, svg) instead of text"
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    named = options.name.partition(":")[0] in PIPELINE_SCHEDULES
    name = options.name if named else options.name.rpartition(":")[2]
    schedule, sizes = find(options.name), (options.ranks, options.micro_batches)
    done = check(schedule, *sizes, steps=options.steps)
    if options.command == "check":
        idle = f"{100 * steady_bubble(schedule, *sizes):.0f} % in a further step"
        print(f"correct: {title(name, done)}; idle {idle}")
    elif options.output:
        draw(options.output, name, done)
    else:
        print(text(name, done))


if __name__ == "__main__":
    sys.exit(main())
