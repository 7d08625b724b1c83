"""Check a scheme, layer, loss or plan: ``python -m pydtnn testing path/to/file.py:name``."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydtnn.comm import create_communicator
from pydtnn.layers import Layer
from pydtnn.losses import Loss
from pydtnn.metrics import Metric
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.mesh import parse_axes
from pydtnn.parallel.schemes import SCHEME
from pydtnn.tools.testing import check_layer, check_loss, check_metric, check_plan, check_scheme
from pydtnn.tools.testing.plan import PlanReport
from pydtnn.tools.testing.scheme import SchemeReport
from pydtnn.utils.command import Parser, add_value, printing
from pydtnn.utils.errors import describe, requested_traceback
from pydtnn.utils.imports import import_object
from pydtnn.utils.units import parse_shape


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report of a check, or one line on the standard error.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of this process.

    Returns
    -------
    int
        Exit status: 0 if it passes all checks, 1 if not.
    """
    try:
        with printing():
            print(_check(create_parser().parse_args(arguments)))
    except Exception as error:
        message = str(error) if isinstance(error, AssertionError) else describe(error)
        print(f"{requested_traceback(error)}{message}", file=sys.stderr)
        return 1
    return 0


def _check(options: argparse.Namespace) -> SchemeReport | PlanReport | str:
    who = f"testing {options.scheme}"
    if ".py:" in options.scheme.rpartition(":")[0]:
        raise ValueError(f"{who}: expected path/to/file.py:name; use --options '{{\"name\": 2}}'")
    shape = parse_shape("--shape", options.shape or "3")
    if options.plan is not None or options.mesh is not None:
        meshes = [parse_axes("--mesh", text) for text in options.mesh or ()] or None
        net = _given(who, import_object(options.scheme, "network"), options.scheme_options)
        _require_shape(who, "a network", options)
        return check_plan(net, shape, options.plan, meshes=meshes)
    if ":" in options.scheme or options.scheme.endswith(".py"):
        target = import_object(options.scheme, "testing")
        kind = target if isinstance(target, type) else type(target)
        for base, check in CHECKS.items():
            if issubclass(kind, base):
                if base is Layer:
                    _require_shape(who, "a layer", options)
                made = _given(who, target, options.scheme_options)() if kind is target else target
                check(made, shape)
                return f"{kind.__name__}: all checks passed for samples of shape {shape}"
        if not issubclass(kind, GradientExchange) and (kind is target or not callable(target)):
            found = f"{who}: expected a layer, loss, metric or scheme"
            raise ValueError(f"{found}, got {target!r}")
    scheme = SCHEME.find(options.scheme)
    make = functools.partial(scheme.make, options.scheme_options)
    make(create_communicator("serial"))  # its constructor raises the most specific errors
    return check_scheme(
        make,
        ranks=options.ranks,
        equal_to_serial=options.equal_to_serial,
        order_dependent=options.order_dependent,
    )


def _require_shape(who: str, what: str, options: argparse.Namespace) -> None:
    if options.shape is None:
        raise ValueError(
            f"{who}: {what} requires the shape of an input without its batch; add --shape, such as "
            "8,8,3 for images or 3 for vectors"
        )


def _given(who: str, target: Any, options: Mapping[str, Any]) -> Any:
    """Return a function that calls another, or a class, with options; other objects as they are."""
    if not callable(target) or isinstance(target, Layer):
        return target
    try:
        inspect.signature(target).bind(**options)
    except TypeError as error:  # "missing a required argument: 'value'"
        raise ValueError(f"{who}: {error}; add --options, such as '{{\"name\": 2}}'") from None
    return functools.partial(target, **options)


CHECKS: dict[type, Callable[..., None]] = {
    Layer: check_layer,
    Loss: check_loss,
    Metric: check_metric,
}
"""Checks by base class; anything else is a scheme."""


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m pydtnn testing",
        description="Check that a parallel scheme, layer, loss or metric keeps its contract, or "
        "that a network computes the same under a plan as serially.",
    )
    parser.add_argument(
        "scheme", metavar="TARGET", help="path/to/file.py:name, or the name of a scheme"
    )
    parser.add_argument(
        "--options",
        "--scheme-options",
        dest="scheme_options",
        type=_options,
        default={},
        metavar="JSON",
        help='arguments of its construction, {"period": 2}',
    )
    parser.add_argument(
        "--shape",
        metavar="N,N,...",
        help="of a layer's or network's input, or predictions for one sample, by default 3",
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
        help="require the results of serial training; by default if the scheme declares them",
    )
    parser.add_argument(
        "--order-dependent",
        action="store_true",
        help="whether results may depend on the order in which messages arrive",
    )
    text = "check a network, which a function returns, under a plan: a strategy or a YAML file"
    add_value(parser, "--plan", "NAME_OR_FILE", text)
    text = "ranks along each axis, data=2,filter=2; may be given several times"
    add_value(parser, "--mesh", "AXIS=N,...", text, action="append")
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
