"""Train a network from the command line: ``python -m pydtnn.train --help``."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn import __version__
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.header import describe_job, first_line, show_logs
from pydtnn.cli.parser import Arguments
from pydtnn.cli.virtual import run_on_virtual_ranks
from pydtnn.comm import Communicator, agree, create_communicator, require_equal
from pydtnn.comm.serial import Serial
from pydtnn.comm.signals import DEFERRED, SIGNALS, SignalWatch
from pydtnn.comm.supervision import supervise_alone
from pydtnn.utils import clock
from pydtnn.utils.command import discard
from pydtnn.utils.errors import EXPLAINED, AgreedError, Interrupted, describe, requested_traceback
from pydtnn.utils.launcher import is_first_on_host
from pydtnn.utils.observer import phase
from pydtnn.utils.terminal import terminal_of

if TYPE_CHECKING:
    from pydtnn.cli.build import Job

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
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  a daemon has none
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the output pipe is closed, as in `... --help | head -1`
        discard()
        return 128 + signal.SIGPIPE


def _main(arguments: Sequence[str] | None) -> int:
    comm, begin = None, clock.now()
    try:
        comm = create_communicator()
        with _terminated_in_order(comm), _on_terminal(comm):
            config, notes = _configure(comm, arguments)
            try:
                with show_logs(comm.rank, verbose=config.verbose, quiet=config.quiet):
                    _log.debug("communicator and options: %.2f s", clock.now() - begin)
                    if config.virtual_ranks is None:
                        _run(config, comm, notes)
                    else:
                        run_on_virtual_ranks(config, comm, lambda own: _run(config, own, notes))
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
        if isinstance(error, Interrupted):
            return 128 + error.signal
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


@contextlib.contextmanager
def _terminated_in_order(comm: Communicator) -> Iterator[None]:
    """Convert signals of a single rank to exceptions, so that terminal and files are restored.

    If that takes too long, as in a kernel, or a second signal arrives, the process ends at once.
    During training, SIGINT and SIGTERM end the run after the step.
    """
    told = threading.Lock()

    def report_signal(number: int) -> None:
        if number != signal.SIGINT and told.acquire(
            blocking=False
        ):  # KeyboardInterrupt is reported by main
            os.write(2, f"{SIGNALS[number]}\n".encode())

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
        leave,
        act=report_signal,
        orderly=supervision.last_step,
        report=supervision.request_table,
    )
    try:
        yield
    finally:
        watch.stop()


@contextlib.contextmanager
def _on_terminal(comm: Communicator) -> Iterator[None]:
    """Print directly to the terminal that the launcher would copy the output of rank 0 to.

    Lines and the progress bar are then written in order.
    """
    terminal = terminal_of(sys.stdout) if comm.rank == 0 else None
    if terminal is None or terminal is sys.stdout:
        yield
        return
    with terminal, contextlib.redirect_stdout(terminal):
        yield


def _configure(
    comm: Communicator, arguments: Sequence[str] | None
) -> tuple[TrainConfig, Sequence[str]]:
    """Return the configuration, and lines that describe how it continues an earlier run.

    Collective: all ranks call it; rank 0 reads the earlier run.
    """
    given = _together(comm, _once, comm, Arguments, arguments)
    _require_equal(comm, {"folder of --resume": given.folder})
    if given.folder is None:
        return _together(comm, _once, comm, given.configure), ()
    from pydtnn.cli.run_directory import describe_changes, read_run, start_values
    from pydtnn.comm.agree import on_rank_0

    run = comm.gather_object(on_rank_0(comm, read_run, given.folder))[0]
    values = start_values(run, given.given, comm.size)
    config = _together(comm, _once, comm, given.configure, values)
    changes = describe_changes(run, config)
    return config, [f"changed: {changes}"] if changes else ()


def _once(comm: Communicator, work: Callable[..., Any], *args: Any) -> Any:
    """Call `work` on every rank; only rank 0 prints, such as the help page."""
    with contextlib.ExitStack() as stack:
        if comm.rank > 0:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        return work(*args)


def _run(config: TrainConfig, comm: Communicator, notes: Sequence[str]) -> None:
    for line in (first_line(config, comm.size), *notes):  # before imports that take time
        _say(config, comm, line)
    begin = clock.now()
    from pydtnn.cli.build import create_job
    from pydtnn.cli.mesh import AUTO, create_mesh
    from pydtnn.cli.parallel import check_messages, choose_allreduce
    from pydtnn.cli.predicted import choose_parallel, predict_run
    from pydtnn.cli.report import log_details
    from pydtnn.cli.run_directory import run_directory
    from pydtnn.cli.transport import choose_transport, gpu_facts, take_gpu
    from pydtnn.cli.workload import fetch_data, share_data
    from pydtnn.comm.cores import shared_gpu, threads_per_rank
    from pydtnn.tracing.writing import check_folder
    from pydtnn.training.examination import examine
    from pydtnn.utils.machine import cpu_model, limit_blas_threads
    from pydtnn.utils.units import align

    _log.debug("imports: %.2f s", clock.now() - begin)
    _require_equal(comm, {"pydtnn": __version__, **asdict(config)})
    if comm.supervision is not None:
        comm.supervision.limit(config.timeout)
    cupy = _together(comm, take_gpu, config, comm)
    if config.exact:  # other kernels would round differently
        facts = {"CPU": cpu_model(), "NumPy": np.__version__}
        _require_equal(comm, facts if cupy is None else facts | gpu_facts(cupy))
    # Virtual ranks compute at the same time where their clocks allow it.
    threads = 1 if config.virtual_ranks else _together(comm, threads_per_rank, comm)
    comm = _together(comm, choose_allreduce, config, comm)
    comm = _together(comm, choose_transport, config, comm, cupy)
    comm = check_messages(config, comm)
    if cupy is not None and (shared := shared_gpu(comm, cupy)):
        _say(config, comm, f"{shared}, which reduces the speed of each")
    if config.trace is not None:
        check_folder(config.trace, comm, "train: --trace")
    if config.download or config.stage is not None:
        supervision = comm.supervision
        with phase(supervision.activity if supervision else None, "download"):  # has no deadline
            _together(comm, fetch_data, config, comm)
    if config.parallel == AUTO:
        config, why = _together(comm, choose_parallel, config, comm, config.threads or threads)
        for line in why:
            _say(config, comm, line)
    mesh = _together(comm, create_mesh, config.parallel, comm)
    # BLAS has one thread, so that the order of its sums does not depend on their number.
    groups = mesh or contextlib.nullcontext()
    with groups, run_directory(config, comm) as directory, limit_blas_threads(1):
        threads = config.threads or threads
        data = _together(comm, share_data, config, comm)
        examine(comm, *data, threads=config.loader_threads)
        job = _together(comm, create_job, config, comm, threads, directory, mesh, data)
        backend = job.trainer.model.backend
        _require_equal(comm, {"instruction set": backend.isa, "tuning": backend.autotuner.mode})
        if config.exact:
            names = {"libraries of the GPU": "versions", "TF32": "tf32"}
            _require_equal(comm, {key: getattr(backend, name, None) for key, name in names.items()})
        for line in align(describe_job(job), 2):
            _say(config, comm, line)
        log_details(job)
        job.predicted = _together(comm, predict_run, config, job.work, comm, threads)
        _carry_out(job)


def _carry_out(job: Job) -> None:
    from pydtnn.cli.report import print_report, write_run_file
    from pydtnn.cli.tracing import describe_trace, traced
    from pydtnn.comm.agree import on_rank_0
    from pydtnn.saving.weights import write_weights
    from pydtnn.training.callback import evaluated
    from pydtnn.training.progress import format_logs

    config, trainer = job.config, job.trainer
    if config.load_options:
        _say(config, trainer.comm, str(job.loaded))
    if config.resume:
        _resume(job)
    complete = not config.evaluate_only and trainer.epoch >= config.epochs
    trace = None
    if config.evaluate_only:
        with traced(job) as trace:
            results = trainer.evaluate(job.validation, global_batch_size=job.work.batch)
    elif complete:
        _say(
            config,
            trainer.comm,
            f"the run is complete: {trainer.epoch} of {config.epochs} epochs; add "
            f"--epochs {2 * trainer.epoch} to train on",
        )
    else:
        on_rank_0(trainer.comm, write_run_file, job)
        with traced(job) as trace:
            trainer.fit(
                job.train,
                job.validation,
                epochs=config.epochs,
                global_batch_size=job.work.batch,
                augment=job.augment,
                mix=config.mixings(),
                steps_per_epoch=config.steps_per_epoch,
                drop_last=config.drop_last,
                seed=config.seed,
                loader_threads=0 if config.virtual_ranks else config.loader_threads,
            )
    if config.save and config.saves_weights:
        with evaluated(trainer):
            state = trainer.model.state()
            on_rank_0(trainer.comm, write_weights, state, config.save)
    elif config.save:
        trainer.save(config.save)
    if config.evaluate_only or config.quiet or complete:
        if trainer.comm.rank == 0:
            print(format_logs(results if config.evaluate_only else trainer.history[-1]), flush=True)
    else:
        print_report(job)
    if trace is not None:
        _say(config, trainer.comm, describe_trace(trace))


def _resume(job: Job) -> None:
    from pydtnn.training.checkpoint import load_checkpoint

    path = load_checkpoint(job.directory, job.trainer)
    if path is not None:
        verb = "evaluating" if job.config.evaluate_only else "continuing from"
        _say(job.config, job.trainer.comm, f"{verb} {path}")
    elif job.config.evaluate_only:
        raise AgreedError(
            f"train: --resume: expected a checkpoint in {job.directory}, found none; use --load"
        )
    else:
        line = f"no checkpoint in {job.directory} yet: starting from the beginning"
        _say(job.config, job.trainer.comm, line)


def _say(config: TrainConfig, comm: Communicator, line: str) -> None:
    if comm.rank == 0 and not config.quiet:
        print(line, flush=True)


def _together(comm: Communicator, work: Callable[..., Any], *args: Any) -> Any:
    """Call `work` on every rank; if it fails on any rank, all ranks raise `AgreedError`.

    Only errors in `EXPLAINED` are agreed on; others propagate and terminate the run.
    """
    result, problem = None, None
    try:
        result = work(*args)
    except BrokenPipeError:  # the output pipe is closed: no message can be printed
        raise
    except EXPLAINED as error:
        problem = error
    agree(comm, problem)
    return result


def _require_equal(comm: Communicator, facts: dict[str, Any]) -> None:
    """Raise AgreedError if ranks were started with different options or on different hardware."""
    advice = "start them with one command, on machines of one kind"
    require_equal(comm, "train", facts, advice)


if __name__ == "__main__":
    sys.exit(main())
