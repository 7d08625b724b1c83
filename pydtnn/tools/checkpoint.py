"""Checkpoints of a run, listed and verified: ``python -m pydtnn checkpoint --help``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydtnn.training.checkpoint import find_checkpoints
from pydtnn.training.checkpoint.folder import step_of
from pydtnn.training.checkpoint.reading import examine, read_checkpoint
from pydtnn.utils.command import Parser, run_subcommand, subcommands
from pydtnn.utils.units import align, format_quantity

EXAMPLES = """examples:
  python -m pydtnn checkpoint list runs/resnet20-cifar10-1
  python -m pydtnn checkpoint verify runs/resnet20-cifar10-1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments; return the exit status, see `run_subcommand`."""
    return run_subcommand("pydtnn checkpoint", create_parser(), arguments)


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser, commands = subcommands("pydtnn checkpoint", "List and verify checkpoints.", EXAMPLES)
    for name, command, text in (
        ("list", _list, "print the checkpoints of a run"),
        ("verify", _verify, "compare all files with their checksums; status 1 if one is damaged"),
    ):
        own = commands.add_parser(name, help=text)
        own.add_argument("folder", metavar="RUN", help="folder of a run")
        own.set_defaults(command=command)
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


def _print(*lines: str) -> None:
    for line in lines:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
