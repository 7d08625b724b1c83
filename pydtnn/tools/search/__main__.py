"""Search for hyper-parameters from the command line: ``python -m pydtnn search --help``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydtnn.comm import create_communicator
from pydtnn.comm.agree import on_rank_0, on_remaining, together
from pydtnn.comm.monitor.failure import leave
from pydtnn.tools.search.dimension import WHO
from pydtnn.tools.search.lines import best_of, result_of
from pydtnn.tools.search.search import print_line, search
from pydtnn.tools.search.space import Space, read_space
from pydtnn.tools.search.training import command_of, configuration
from pydtnn.utils.command import HelpFormatter, Parser, discard, lasting_output
from pydtnn.utils.errors import AgreedError, describe, requested_traceback
from pydtnn.utils.files import write_file
from pydtnn.utils.imports import import_object

EXAMPLES = """examples:
  python -m pydtnn search space.yaml
  mpirun -np 8 python -m pydtnn search space.yaml --ranks-per-trial 2
  python -m pydtnn search space.yaml --trials 100 --export best.yaml   (continues the study)

space.yaml:
  fixed: {model: resnet20, dataset: cifar10, epochs: 10}
  space:
    lr: {low: 1e-3, high: 1.0, log: true}
    batch_size: [32, 64, 128]
    optimizer: [sgd, adamw]
    momentum: {low: 0.5, high: 0.99, if: {optimizer: sgd}}
  objective: {maximize: val_accuracy}
  sampler: tpe       # grid, random, quasi-random, tpe, cma-es, nsga2
  pruner: asha       # none, median, asha, hyperband
  trials: 64
  stop: {val_accuracy: 0.85, after: 2h}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, 0 on success. Collective: all ranks call it.

    With several ranks an error is raised, and the hook of the communicator prints it once.
    """
    comm = None
    try:
        comm = create_communicator()
        with lasting_output():
            _run(comm, sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:
        if comm is not None and comm.size > 1:
            raise
        discard()
        return 128 + signal.SIGPIPE
    except (Exception, KeyboardInterrupt) as error:
        if comm is not None and comm.size > 1:
            raise
        print(f"{requested_traceback(error)}{describe(error)}", file=sys.stderr)
        if isinstance(error, AgreedError):
            return error.status
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def create_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m pydtnn search",
        usage="[mpirun -np RANKS] python -m pydtnn search SPACE [options]",
        description="Search for hyper-parameters: groups of ranks train the trials of one study.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("space", metavar="SPACE", help="file with the space, see below")
    parser.add_argument(
        "--study",
        metavar="FOLDER",
        help="folder of the study and its trials, which several jobs may share; a study in it is "
        "continued (default: runs/NAME for the space NAME.yaml)",
    )
    parser.add_argument(
        "--ranks-per-trial",
        type=_whole,
        default=1,
        metavar="N",
        help="ranks that train a trial together (default: 1)",
    )
    parser.add_argument("--trials", type=_whole, metavar="N", help="instead of those of the file")
    parser.add_argument(
        "--export", metavar="FILE", help="write the options of the best trial, for --config"
    )
    return parser


def _whole(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return int(text)


def parse(prints: bool, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options; only a rank that prints shows the help page."""
    with contextlib.ExitStack() as stack:
        if not prints:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        return create_parser().parse_args(arguments)


def _run(comm: Any, arguments: Sequence[str]) -> None:
    options = together(comm, parse, comm.rank == 0, arguments)
    space = together(comm, _read, options)
    folder = Path(options.study or Path("runs") / Path(options.space).stem)
    objective = None
    if space.function:
        objective = together(comm, import_object, space.function, f"{WHO}: function")
    comm, study = search(objective, space, folder, options.ranks_per_trial, comm, print_line)
    on_remaining(comm, lambda comm: on_rank_0(comm, _finish, space, study, options))


def _read(options: argparse.Namespace) -> Space:
    space = read_space(options.space)
    return space if options.trials is None else replace(space, trials=options.trials)


def _finish(space: Space, study: Any, options: argparse.Namespace) -> None:
    """Write the file of `--export`, and print the best trials."""
    best = best_of(space, study.get_trials(deepcopy=False))
    if best and options.export:  # before lines, for which the terminal may have been closed
        text = configuration(space, best[0])
        write_file(f"{WHO}: --export", options.export, text.encode())
    if not best:
        raise ValueError(f"{WHO}: no trial is complete; see the reasons above")
    for one in best:
        print_line(f"best: {result_of(space, one)}  trial {one.number}")
        if not space.function:
            print_line(f"  {command_of(one)}")


if __name__ == "__main__":
    leave(main())
