"""A table of runs: ``python -m pydtnn runs --help``."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pydtnn.tools.runs.run import Run, read_run
from pydtnn.tools.runs.table import COLUMNS, select_rows, show, show_differences, to_csv, to_json
from pydtnn.training.run_folder import find_runs, is_run
from pydtnn.utils.command import Parser, run_command
from pydtnn.utils.errors import printable

WHO = "runs"

MAX_DEPTH = 3
"""Levels of folders in which runs are found."""

EXAMPLES = """examples:
  python -m pydtnn runs
  python -m pydtnn runs sweep --sort best --reverse --filter 'model=resnet*' --filter 'lr>=0.05'
  python -m pydtnn runs --diff resnet20-cifar10-1 resnet20-cifar10-2
  python -m pydtnn runs --format csv > runs.csv
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status, 0 on success.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """
    return run_command(WHO, lambda: _run(create_parser().parse_args(arguments)))


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "python -m pydtnn runs",
        description="List runs of training: epochs, best value, throughput, time and state.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folders",
        nargs="*",
        default=["runs"],
        metavar="FOLDER",
        help="of runs, or that of a run (default: runs)",
    )
    parser.add_argument(
        "--sort",
        default="started",
        metavar="NAME",
        help="column or option (default: started); columns: " + ", ".join(COLUMNS),
    )
    parser.add_argument("--reverse", action="store_true", help="the largest value first")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="runs whose column or option has this value, which may have wildcards, or with >, >=, "
        "<, <=, !=; can be repeated",
    )
    parser.add_argument(
        "--diff",
        nargs="+",
        default=[],
        metavar="RUN",
        help="print what differs between these runs: folders, or names in FOLDER",
    )
    parser.add_argument(
        "--format",
        choices=("table", "json", "csv"),
        default="table",
        help="of the output; csv and json have seconds, rates and text in full",
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    width = shutil.get_terminal_size((0, 0)).columns or None  # None if it is not a terminal
    if options.diff:
        if len(options.diff) < 2:
            raise ValueError(f"--diff requires at least 2 runs, got {len(options.diff)}")
        chosen = [read_run(WHO, _find(name, options.folders)) for name in options.diff]
        print("\n".join(show_differences(chosen, width)))
        return
    runs, problems = _read(options.folders)
    rows = select_rows(runs, options.filter, options.sort, options.reverse)
    if options.format == "json":
        print(to_json(rows, {str(run.folder): run.configuration for run in runs}))
    elif options.format == "csv":
        print(to_csv(rows), end="")
    elif rows:
        print("\n".join(show(rows, width)))
    else:
        print("no run meets the conditions" if runs else "no run could be read")
    for problem in problems:
        print(printable(problem), file=sys.stderr)


def _read(folders: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Return the runs in folders, and a sentence for each that is damaged."""
    paths: list[Path] = []
    for folder in map(Path, folders):
        found = [folder] if is_run(folder) else find_runs(folder, MAX_DEPTH)
        if not found:
            missing = "contains no run" if folder.is_dir() else "does not exist"
            raise ValueError(
                f"{folder} {missing}; name the folder that contains those that python -m "
                "pydtnn.train prints as 'run folder'"
            )
        paths += [path for path in found if path not in paths]
    runs, problems = [], []
    for path in sorted(paths):
        try:
            runs.append(read_run(WHO, path))
        except (OSError, ValueError) as error:
            problems.append(str(error))
    return runs, problems


def _find(name: str, folders: Sequence[str]) -> Path:
    """Return the folder of a run that is given by a path, or by its name in one of the folders."""
    places = [Path(name), *(Path(folder) / name for folder in folders)]
    return next((place for place in places if is_run(place)), places[0])


if __name__ == "__main__":
    sys.exit(main())
