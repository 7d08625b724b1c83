"""Start a run again after a failure: ``python -m pydtnn launch --help``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydtnn.cli.config import TrainConfig, flags, typed
from pydtnn.cli.parser import Arguments
from pydtnn.cli.run_directory import (
    INITIAL,
    RUNS,
    claim,
    read_run,
    remove_empty,
    start_values,
    take_free_folder,
)
from pydtnn.tools.child import ENDING, ProgramEnd, run_child
from pydtnn.training.checkpoint import find_checkpoints
from pydtnn.training.checkpoint.folder import step_of
from pydtnn.training.run_folder import RUN_FILE, is_run, read_about
from pydtnn.utils.command import HelpFormatter, Parser, printing
from pydtnn.utils.errors import NotSavedError, describe, printable, requested_traceback

EXAMPLES = """examples:
  python -m pydtnn launch -- mpirun -np 8 python -m pydtnn.train --model resnet44
  python -m pydtnn launch --restarts 10 -- mpirun -np 8 --hostfile hosts \\
      python -m pydtnn.train --dataset cifar10 --global-batch-size 512 --output-dir runs/mine
"""

MAX_STALLED_RESTARTS = 2
"""Restarts in a row without a newer checkpoint after which no further one is made."""

UNLOCK_S = 60.0
"""Seconds in which the processes of a failed run must have ended."""

USER_ERROR = 1
"""Exit status of a command whose options are refused, and of an error in training."""

ENDED_BY_SIGNAL = (*(128 + one for one in (*ENDING, signal.SIGUSR1)), 128 + signal.SIGPIPE)
"""Exit statuses of runs that have been ended on purpose."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status of the last run, or 1 for invalid arguments."""
    try:
        with printing():
            options = _parse(sys.argv[1:] if arguments is None else arguments)
            return Launch(options.command, options.restarts).run()
    except Exception as error:
        text = describe(error)
        text = text if text.startswith(("launch: ", "train: ")) else f"launch: {text}"
        print(f"{requested_traceback(error)}pydtnn.{text}", file=sys.stderr)
        return 1


def create_parser() -> Parser:
    """Return the parser of the options before ``--``."""
    parser = Parser(
        prog="python -m pydtnn launch",
        usage="python -m pydtnn launch [options] -- [mpirun ...] python -m pydtnn.train [options]",
        description="Run a training, and run it again from its last checkpoint if it fails.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--restarts", type=_count, default=3, metavar="N", help="most restarts; default: 3"
    )
    parser.add_argument(
        "command",
        nargs="*",
        metavar="-- COMMAND",
        help="runs pydtnn.train, with mpirun, srun or alone",
    )
    return parser


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,6}", text):
        raise argparse.ArgumentTypeError(f"expected a number of restarts from 0, got {text!r}")
    return int(text)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options before the first ``--``, and the command behind it."""
    if "--" not in arguments and arguments and not {"-h", "--help"} & {*arguments}:
        raise ValueError(
            "launch: expected -- before the command to run; write: python -m pydtnn launch "
            "--restarts 3 -- mpirun -np 8 python -m pydtnn.train --model resnet44"
        )
    at = [*arguments, "--"].index("--")
    options = create_parser().parse_args(arguments[:at] or ["--help"] * (not arguments))
    options.command = [*arguments[at + 1 :]]
    return options


def find_options(command: Sequence[str]) -> int:
    """Return the position of the first option of `pydtnn.train` in a command.

    Raises
    ------
    ValueError
        If it does not run `pydtnn.train`.
    """
    for at in range(len(command)):
        for program in (["-m", "pydtnn.train"], ["-m", "pydtnn", "train"]):
            if [*command[at : at + len(program)]] == program:
                return at + len(program)
        name = os.path.basename(command[at])
        if name == "pydtnn-train":
            return at + 1
        if name == "pydtnn" and [*command[at + 1 : at + 2]] == ["train"]:
            return at + 2
    raise ValueError(
        f"launch: expected a command that runs pydtnn.train, got {shlex.join(command)!r}; write: "
        "python -m pydtnn launch -- mpirun -np 8 python -m pydtnn.train --model resnet44"
    )


@dataclass
class Progress:
    """What a run had written at some time.

    Attributes
    ----------
    checkpoint : Path or None
        The newest.
    started : tuple of int
        Changes when training begins.
    ended : bool
        Whether training has ended.
    """

    checkpoint: Path | None
    started: tuple[int, ...]
    ended: bool

    @property
    def step(self) -> int:
        """The step of the checkpoint; -1 without one."""
        return -1 if self.checkpoint is None else step_of(self.checkpoint)

    @classmethod
    def of(cls, folder: Path) -> Progress:
        """Return the progress of the run in a folder."""
        found = find_checkpoints(folder)
        try:
            file = (folder / RUN_FILE).stat()
            started: tuple[int, ...] = file.st_ino, file.st_mtime_ns
        except OSError:
            started = ()
        ended = False
        with contextlib.suppress(OSError, ValueError):
            ended = bool(read_about("launch", folder).get("ended"))
        return cls(found[-1] if found else None, started, ended)


class Launch:
    """A run that is started again when it fails.

    Parameters
    ----------
    command : sequence of str
        Starts the run: ``mpirun ... python -m pydtnn.train ...``.
    restarts : int
        Largest number of restarts.

    Raises
    ------
    ValueError, TypeError, OSError
        If the command does not run `pydtnn.train`, or its options are invalid.
    """

    def __init__(self, command: Sequence[str], restarts: int) -> None:
        at = find_options(command)
        self._before, self._options = [*command[:at]], [*command[at:]]
        self._restarts = restarts
        given = Arguments(self._options)
        start = {}
        if given.folder is not None:
            run = read_run(given.folder)
            start = start_values(run, given.given, run.ranks)
        self._config, self._names = given.configure(start), given.given
        if self._config.evaluate_only:
            raise ValueError("launch: --evaluate-only has nothing to continue; start it directly")

    def run(self) -> int:
        """Run until the end; return the exit status."""
        with self._folder() as folder:
            command = self._first(folder)
            stalled = number = 0
            while True:
                before = Progress.of(folder)
                ended = run_child(command)
                after = Progress.of(folder)
                began = before.started != after.started
                if not failed(ended, began=began, complete=began and after.ended):
                    return ended.status
                why = f"the run has ended (status {ended.status})"
                stalled = stalled + 1 if number and after.step <= before.step else 0
                if stalled == MAX_STALLED_RESTARTS or number == self._restarts:
                    _report(f"{why}; {self._why_given_up(stalled, after)}")
                    return ended.status
                number += 1
                _wait_until_unlocked(folder)
                start = "the beginning" if after.checkpoint is None else str(after.checkpoint)
                _report(f"restart {number} of {self._restarts}: {why}; continuing from {start}")
                command = self._again(folder, number)

    def _why_given_up(self, stalled: int, after: Progress) -> str:
        """Return why there is no further restart, and from where to continue."""
        if stalled == MAX_STALLED_RESTARTS:
            why = f"given up: {stalled} restarts in a row have written no checkpoint"
        else:
            why = f"given up after {self._restarts} restart{'s' * (self._restarts != 1)}"
        where = "there is no checkpoint" if after.checkpoint is None else f"see {after.checkpoint}"
        return f"{why}; {where}"

    # -- folder -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """Context with the folder of all attempts; a new one that remains empty is removed."""
        if self._config.output_dir is not None:
            yield Path(self._config.output_dir)
            return
        path, made = self._job_folder(), list[Path]()
        if path is None:
            with contextlib.ExitStack() as held:
                path = take_free_folder(self._config, made, held)
        try:
            yield path
        finally:
            remove_empty(made)

    def _job_folder(self) -> Path | None:
        """Return the folder of a job of Slurm, the same after it is requeued; None without one."""
        job = os.environ.get("SLURM_JOB_ID", "")
        return RUNS / f"job-{job}" if job.isdecimal() else None

    # -- commands ---------------------------------------------------------------------------------

    def _first(self, folder: Path) -> list[str]:
        """Return the command of the first start, which continues a job that Slurm has requeued."""
        requeued = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
        if requeued and is_run(folder):
            return self._again(folder, 0)
        more = [] if self._config.output_dir is not None else ["--output-dir", str(folder)]
        return [*self._before, *self._options, *more]

    def _again(self, folder: Path, number: int) -> list[str]:
        """Return the command that continues the run."""
        left_out = {"output_dir", "resume"}
        if find_checkpoints(folder):
            left_out |= {*INITIAL}
        if is_run(folder):
            options = ["--resume", str(folder)]
        else:
            options, left_out = ["--output-dir", str(folder)], {"output_dir", "resume"}
        known, config = flags(TrainConfig), self._config
        if config.trace is not None and number:  # each attempt has a folder of its own
            config = replace(config, trace=f"{config.trace}-restart{number}")
        for name in sorted({known[name].owner or name for name in self._names - left_out}):
            options += shlex.split(typed(config, name))
        return [*self._before, *options]


def failed(ended: ProgramEnd, *, began: bool, complete: bool) -> bool:
    """Return whether a run has failed, so that it is to be started again.

    Parameters
    ----------
    ended : Ended
    began : bool
        Whether training has begun. Before, an error is one of the options or the data.
    complete : bool
        Whether training has ended. Open MPI's status is 0 also if all ranks were killed.
    """
    over = (NotSavedError.status, *ENDED_BY_SIGNAL)
    if {*ENDING} & {*ended.signals} or ended.status in over:
        return False
    if ended.status == 0:
        return not complete
    return began or ended.status != USER_ERROR


def _wait_until_unlocked(folder: Path) -> None:
    """Wait until no process of the failed run writes in the folder.

    Raises
    ------
    BlockingIOError
        If one remains.
    """
    until = time.monotonic() + UNLOCK_S
    while folder.is_dir():
        with contextlib.ExitStack() as held:
            try:
                claim(folder, held)
                return
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise BlockingIOError(
                        f"launch: processes of the failed run still write in {folder} after "
                        f"{UNLOCK_S:g} s; end them, and continue with --resume {folder}"
                    ) from error
        time.sleep(0.1)


def _report(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"pydtnn.launch: {printable(text)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
