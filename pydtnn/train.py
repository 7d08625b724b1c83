"""Train a network from the command line: ``python -m pydtnn.train --help``."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from types import FrameType
from typing import Any

from pydtnn.cli.config import TrainConfig, read_axes
from pydtnn.cli.parser import Arguments
from pydtnn.comm import Communicator, create_communicator, require_equal
from pydtnn.comm.agree import on_remaining, together
from pydtnn.comm.monitor.failure import leave
from pydtnn.comm.monitor.signals import DEFERRED, SignalWatch, describe_signal
from pydtnn.comm.monitor.supervision import supervise_alone
from pydtnn.comm.serial import Serial
from pydtnn.utils import clock
from pydtnn.utils.command import discard, lasting_output
from pydtnn.utils.errors import AgreedError, describe, printable, requested_traceback
from pydtnn.utils.launcher import is_first_on_host
from pydtnn.utils.tools import find_tool
from pydtnn.utils.version import __version__

_log = logging.getLogger("pydtnn.train")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, 0 on success.

    Collective: all ranks call it. Errors are printed in one line on the standard error, with
    PYDTNN_TRACEBACK=1 after the traceback. With several ranks this function raises the error, and
    the hook that the communicator has installed prints it and terminates all ranks.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """
    try:
        with lasting_output():
            return _main(arguments)
    except BrokenPipeError:  # the output pipe is closed, as in `... --help | head -1`
        discard()
        return 128 + signal.SIGPIPE


def _main(arguments: Sequence[str] | None) -> int:
    comm, begin = None, clock.now()
    try:
        comm = create_communicator(timeout=_given_timeout(arguments))
        with _terminated_in_order(comm):
            # Whether the run survives failures of ranks is not known before.
            comm, (config, notes) = on_remaining(comm, partial(_configure, arguments=arguments))
            if comm.supervision is not None:
                comm.supervision.survive(config.survive)
            try:
                with show_logs(comm.rank, verbose=config.verbose, quiet=config.quiet):
                    _log.debug("communicator and options: %.2f s", clock.now() - begin)
                    execute(config, comm, lambda own: _run(config, own, notes))
            except SystemExit as error:
                if comm.size == 1:
                    raise
                # Called by user code: this rank would exit, and the other ranks would deadlock.
                raise RuntimeError(f"sys.exit({error.code!r}) was called") from error
    except BrokenPipeError as error:
        if comm is None or comm.size == 1:
            raise
        discard()  # this rank cannot exit silently: the other ranks would deadlock
        raise OSError("the pipe of the standard output is closed") from error
    except (Exception, KeyboardInterrupt) as error:
        if comm is not None and comm.size > 1:
            raise
        # Without a communicator, all ranks of a host lack MPI or have the same invalid variable.
        alike = comm is None and isinstance(error, ImportError | ValueError)
        if not alike or is_first_on_host():
            print(f"{requested_traceback(error)}{describe(error)}", file=sys.stderr)
        if isinstance(error, AgreedError):
            return error.status
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _given_timeout(arguments: Sequence[str] | None) -> float | None:
    """Return ``--timeout`` if it is given as an argument: options are read by ranks together."""
    line = " ".join(sys.argv[1:] if arguments is None else arguments)
    given = re.findall(r"(?<!\S)--timeout[ =](\d+(?:\.\d*)?)(?!\S)", line)
    return float(given[-1]) if given else None


@contextlib.contextmanager
def _terminated_in_order(comm: Communicator) -> Iterator[None]:
    """Convert signals of a single rank to exceptions, so that terminal and files are restored.

    If that takes too long, as in a kernel, or a second signal arrives, the process ends at once.
    During training, SIGINT and SIGTERM end the run after the step.
    """
    reported = threading.Lock()

    def report_signal(number: int) -> None:
        # KeyboardInterrupt is reported by main.
        if number != signal.SIGINT and reported.acquire(blocking=False):
            os.write(2, f"{describe_signal(number)}\n".encode())

    def leave(number: int, frame: FrameType | None) -> None:
        if number in DEFERRED and supervision.last_step.request(number):
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        report_signal(number)
        raise SystemExit(128 + number)

    if comm.size > 1 or threading.current_thread() is not threading.main_thread():
        yield  # the communicator handles signals, or this thread cannot install handlers
        return
    supervision = comm.supervision or supervise_alone()
    if isinstance(comm, Serial):
        comm.supervise(supervision)
    watch = SignalWatch(
        leave,
        act=report_signal,
        orderly=supervision.last_step,
        report=supervision.request_table,
    )
    try:
        yield
    finally:
        watch.stop()


def _configure(
    comm: Communicator, arguments: Sequence[str] | None
) -> tuple[TrainConfig, Sequence[str]]:
    """Return the configuration, and lines that describe how it continues an earlier run.

    Collective: all ranks call it; rank 0 reads the earlier run.
    """
    given = together(comm, _once, comm, Arguments, arguments)
    advice = "start them with one command"
    require_equal(comm, "train", {"folder of --resume": given.folder}, advice)
    if given.folder is None:
        return together(comm, _once, comm, given.configure), ()
    from pydtnn.cli.run_directory import describe_changes, read_run, start_values
    from pydtnn.comm.agree import on_rank_0

    run = comm.gather_object(on_rank_0(comm, read_run, given.folder))[0]
    values = start_values(run, given.given, comm.size)
    config = together(comm, _once, comm, given.configure, values)
    changes = describe_changes(run, config)
    return config, [f"changed: {changes}"] if changes else ()


def _once(comm: Communicator, work: Callable[..., Any], *args: Any) -> Any:
    """Call `work` on every rank; only rank 0 prints, such as the help page."""
    with contextlib.ExitStack() as stack:
        if comm.rank > 0:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        return work(*args)


def execute(
    config: TrainConfig, comm: Communicator, program: Callable[[Communicator], Any]
) -> None:
    """Call `program` on every rank: those of the job, or threads that they have."""
    if config.virtual_ranks is not None:
        find_tool("virtual_ranks", "train: --virtual-ranks").run_on_virtual_ranks(
            config, comm, program
        )
    elif config.exact_mesh:
        from pydtnn.comm.hybrid import run_hybrid

        run_hybrid(comm, prod(read_axes(config.parallel).values()), program)
    else:
        program(comm)


def _run(config: TrainConfig, comm: Communicator, notes: Sequence[str]) -> None:
    if comm.rank == 0 and not config.quiet:
        for line in (first_line(config, comm.size), *notes):  # before imports that take time
            print(printable(line), flush=True)
    begin = clock.now()
    from pydtnn.cli.run import run

    _log.debug("imports: %.2f s", clock.now() - begin)
    run(config, comm)


def first_line(config: TrainConfig, ranks: int) -> str:
    """Return the line that is printed at once, before anything that takes time."""
    what = "evaluation" if config.evaluate_only else "training"
    return (
        f"pydtnn {__version__}: {what} of {config.model} on {config.dataset}, "
        f"{ranks} rank{'s' * (ranks != 1)}"
    )


class _LineFormatter(logging.Formatter):
    """A format of lines that may quote files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextlib.contextmanager
def show_logs(rank: int, *, verbose: bool = False, quiet: bool = False) -> Iterator[None]:
    """Context in which the loggers below "pydtnn" write to the standard error.

    Parameters
    ----------
    rank : int
        Ranks other than 0 write warnings only, with their rank.
    verbose : bool
        Write messages of all levels, with the logger's name, on rank 0.
    quiet : bool
        Write errors only.
    """
    logger, handler = logging.getLogger("pydtnn"), logging.StreamHandler()
    before = logger.level
    level = logging.ERROR if quiet else logging.WARNING
    text = "%(message)s" if rank == 0 else f"rank {rank}: %(message)s"
    if verbose and rank == 0:
        level, text = logging.DEBUG, "%(name)s: %(message)s"
    handler.setLevel(level)
    handler.setFormatter(_LineFormatter(text))
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


if __name__ == "__main__":
    leave(main())
