"""Pipeline schedules from the command line: ``python -m pydtnn.parallel.pipeline --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydtnn.parallel.pipeline.check import check
from pydtnn.parallel.pipeline.draw import text, title
from pydtnn.parallel.pipeline.picture import draw
from pydtnn.parallel.pipeline.schedules import find
from pydtnn.utils.errors import describe, requested_traceback
from pydtnn.utils.output import printing

EXAMPLES = """examples:
  python -m pydtnn.parallel.pipeline draw 1f1b
  python -m pydtnn.parallel.pipeline draw gpipe --stages 3 --output gpipe.pdf
  python -m pydtnn.parallel.pipeline check path/to/file.py:my_schedule --stages 4
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
    try:
        with printing():
            _run(_parser().parse_args(arguments))
    except Exception as error:
        print(
            f"{requested_traceback(error)}pydtnn.parallel.pipeline: {describe(error)}",
            file=sys.stderr,
        )
        return 1
    return 0


class _Parser(argparse.ArgumentParser):
    """Parser that raises its errors as exceptions with a one-sentence message."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _parser() -> _Parser:
    parser = _Parser(
        "python -m pydtnn.parallel.pipeline",
        description="Draw and check pipeline schedules.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("draw", "check"), help="show it, or prove it")
    parser.add_argument(
        "name", metavar="NAME", help="1f1b, eager_1f1b, gpipe or path/to/file.py:function"
    )
    for name, usual in (("stages", 4), ("micro-batches", 8)):
        parser.add_argument(
            f"--{name}", type=int, default=usual, metavar="N", help=f"default: {usual}"
        )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="draw a picture (png, pdf, svg) instead of text"
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    name = options.name.rpartition(":")[2]
    done = check(find(options.name), options.stages, options.micro_batches)
    if options.command == "check":
        print(f"right: {title(name, done)}")
    elif options.output:
        draw(options.output, name, done)
    else:
        print(text(name, done))


if __name__ == "__main__":
    sys.exit(main())
