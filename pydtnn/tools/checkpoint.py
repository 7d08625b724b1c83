"""Checkpoints of a run, listed, verified and compared: ``python -m pydtnn checkpoint --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydtnn.training.checkpoint import find_checkpoints
from pydtnn.training.checkpoint.folder import step_of
from pydtnn.training.checkpoint.inspection import (
    differences,
    examine,
    newest,
    value_differences,
)
from pydtnn.training.checkpoint.reading import Checkpoint, read_checkpoint
from pydtnn.utils.command import Parser, run_subcommand, subcommands
from pydtnn.utils.units import align, format_quantity

EXAMPLES = """examples:
  python -m pydtnn checkpoint list runs/resnet20-cifar10-1
  python -m pydtnn checkpoint verify runs/resnet20-cifar10-1
  python -m pydtnn checkpoint diff runs/one runs/another
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments; return the exit status, see `run_subcommand`."""
    return run_subcommand("pydtnn checkpoint", create_parser(), arguments)


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser, commands = subcommands(
        "pydtnn checkpoint", "List, verify and compare checkpoints.", EXAMPLES
    )
    for name, command, text in (
        ("list", _list, "print the checkpoints of a run"),
        ("verify", _verify, "compare all files with their checksums; status 1 if one is damaged"),
    ):
        own = commands.add_parser(name, help=text)
        own.add_argument("folder", metavar="RUN", help="folder of a run")
        own.set_defaults(command=command)
    diff = commands.add_parser("diff", help="print what differs between two; status 1 if any does")
    for name in ("first", "second"):
        diff.add_argument(name, help="a checkpoint, or a run, of which the newest is taken")
    diff.add_argument("--top", type=int, default=20, help="arrays to print; default: 20")
    diff.set_defaults(command=_diff)
    return parser


def _checkpoints(options: argparse.Namespace) -> list[Path]:
    folder = Path(options.folder)
    found = find_checkpoints(folder)
    if not found:
        state = "contains no checkpoint" if folder.is_dir() else "does not exist"
        raise ValueError(f"{folder} {state}; name the folder of a run")
    return found


def _list(options: argparse.Namespace) -> None:
    rows = [("checkpoint", "step", "epoch", "files", "arrays", "size")]
    for path in _checkpoints(options):
        try:
            found = read_checkpoint(path)
        except ValueError as error:
            rows.append((path.name, str(step_of(path)), "", "", "", f"damaged: {error}"))
            continue
        (trainer, *_) = found.content["parts"]["trainer"]
        files, arrays = len(found.layout.files), len(found.layout.arrays)
        size = format_quantity(found.nbytes, "B")
        epoch = str(trainer["values"]["epoch"])
        rows.append((path.name, str(step_of(path)), epoch, str(files), str(arrays), size))
    _print(*align(rows, 1))


def _verify(options: argparse.Namespace) -> None:
    bad = 0
    paths = _checkpoints(options)
    for path in paths:
        found, problem = examine(path)
        bad += bool(problem)
        size = "" if found is None else format_quantity(found.nbytes, "B")
        _print(f"{path.name}: {problem or f'good, {size}'}")
    if bad:
        raise ValueError(
            f"{bad} of {len(paths)} checkpoints are damaged; delete them: --resume continues from "
            "the newest of the others"
        )


def _diff(options: argparse.Namespace) -> None:
    first, second = (_good(newest(Path(name))) for name in (options.first, options.second))
    if first.sums == second.sums:
        _print("equal")
        return
    found = list(differences(first, second))
    values = [*value_differences(_values(first), _values(second))]
    if not found and not values:  # with checksums of different kinds
        _print("equal")
        return
    rows = [("array", "elements that differ", "largest difference", "relative")]
    for one in sorted(found, key=lambda one: -one.relative)[: options.top]:
        if one.reason:
            rows.append((one.name, one.reason, "", ""))
        else:
            share = f"{one.elements:,} of {one.size:,}"
            rows.append((one.name, share, f"{one.absolute:.3g}", f"{one.relative:.3g}"))
    if found:
        _print(*align(rows, 1))
    arrays = len(first.layout.arrays)
    _print(f"{len(found)} of {arrays} arrays differ")
    _print(*values[: options.top])
    if len(values) > options.top:
        _print(f"and {len(values) - options.top} further values")
    raise ValueError(f"{first.path} and {second.path} differ")


def _good(path: Path) -> Checkpoint:
    found, problem = examine(path)
    if found is None or problem:
        raise ValueError(f"{path} cannot be used: {problem}")
    return found


def _values(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what is not in arrays."""
    content = {**checkpoint.content}
    parts = content.pop("parts")
    values = {name: [state["values"] for state in states] for name, states in parts.items()}
    return {**content, "parts": values}


def _print(*lines: str) -> None:
    for line in lines:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
