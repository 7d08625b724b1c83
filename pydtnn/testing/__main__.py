"""Check a parallel scheme: ``python -m pydtnn.testing path/to/file.py:Class``."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from pydtnn.comm import create_communicator
from pydtnn.parallel.schemes import SCHEME
from pydtnn.testing.scheme import check_scheme
from pydtnn.testing.scheme_report import SchemeReport
from pydtnn.utils.errors import describe, requested_traceback
from pydtnn.utils.output import printing


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of `check_scheme`, or one line on the standard error.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of this process.

    Returns
    -------
    int
        Exit status: 0 if the scheme passes all checks, 1 if not.
    """
    try:
        with printing():
            print(_check(_parser().parse_args(arguments)))
    except Exception as error:
        told = str(error) if isinstance(error, AssertionError) else describe(error)
        print(f"{requested_traceback(error)}{told}", file=sys.stderr)
        return 1
    return 0


def _check(options: argparse.Namespace) -> SchemeReport:
    scheme = SCHEME.find(options.scheme)
    make = functools.partial(scheme.make, options.scheme_options)
    make(create_communicator("serial"))  # its constructor raises the most specific errors
    return check_scheme(
        make,
        ranks=options.ranks,
        equal_to_serial=options.equal_to_serial,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see python -m pydtnn.testing --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pydtnn.testing",
        description="Check that a parallel scheme keeps its contract.",
    )
    parser.add_argument("scheme", help="path/to/file.py:Class, or the name of one of the library's")
    parser.add_argument(
        "--scheme-options", type=_options, default={}, metavar="JSON", help='{"period": 2}'
    )
    parser.add_argument(
        "--ranks",
        type=_numbers,
        default=(1, 2, 3, 4),
        metavar="P,P,...",
        help="numbers of ranks; by default 1,2,3,4",
    )
    parser.add_argument(
        "--equal-to-serial",
        action=argparse.BooleanOptionalAction,
        help="whether it must compute what serial training does; by default if it promises so",
    )
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers like 1,2,4, got {text!r}") from None


def _options(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f'expected names and values like {{"period": 2}}, got {text!r}'
        ) from None


if __name__ == "__main__":
    sys.exit(main())
