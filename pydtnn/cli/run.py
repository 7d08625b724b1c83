"""A run, from its configuration to its report."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from pydtnn.callbacks import Checkpointer
from pydtnn.cli.build import Job, create_job
from pydtnn.cli.config import AUTO_PARALLEL, TrainConfig
from pydtnn.cli.parallel import (
    choose_allreduce,
    choose_transport,
    create_mesh,
    gpu_facts,
    take_gpu,
)
from pydtnn.cli.report import describe_job, log_details, print_report, write_end, write_run_files
from pydtnn.cli.run_directory import RunFolder, run_directory
from pydtnn.cli.workload import changes_of, fetch_data, share_data
from pydtnn.comm import Communicator, require_equal
from pydtnn.comm.agree import on_rank_0, together
from pydtnn.comm.cores import shared_gpu, threads_per_rank
from pydtnn.comm.monitor.slots import FLIGHT
from pydtnn.data import Dataset
from pydtnn.saving.weights import write_weights
from pydtnn.training.callback import Callback, evaluated, write_if_possible
from pydtnn.training.checkpoint import load_checkpoint
from pydtnn.training.examination import examine
from pydtnn.training.logs import VALIDATION, Logs
from pydtnn.training.progress import format_arrays, format_logs
from pydtnn.utils.errors import (
    AgreedError,
    Interrupted,
    NotSavedError,
    RankFailure,
    describe,
    printable,
)
from pydtnn.utils.machine import cpu_model, limit_blas_threads
from pydtnn.utils.observer import phase
from pydtnn.utils.tools import find_tool
from pydtnn.utils.units import align
from pydtnn.utils.version import __version__

_log = logging.getLogger("pydtnn.train")


def run(
    config: TrainConfig,
    comm: Communicator,
    callbacks: Sequence[Callback] = (),
    data: tuple[Dataset, Dataset] | None = None,
) -> None:
    """Build all parts, train or evaluate, and report. Collective: all ranks call it.

    With `--survive` this is done again, from the state in memory, whenever ranks have failed.

    Parameters
    ----------
    config : TrainConfig
    comm : Communicator
    callbacks : sequence of Callback
        Called after those of the options.
    data : (Dataset, Dataset), optional
        Training and validation set, if they are loaded already.
    """
    if comm.supervision is not None:
        comm.supervision.limit(config.timeout)  # before the first call that waits for other ranks
    survival = None
    if config.survive:
        tool = together(comm, find_tool, "survival", "train: --survive")
        survival = tool.Survival(config, comm.launched)
    while True:
        try:
            if survival is not None:
                config = together(comm, survival.on, comm)
            return _attempt(config, comm, survival, callbacks, data)
        except (Exception, RankFailure) as error:
            if survival is None or not (isinstance(error, RankFailure) or comm.lost_ranks()):
                raise
        comm = survival.recover(comm)


def _attempt(
    config: TrainConfig,
    comm: Communicator,
    survival: Any,
    callbacks: Sequence[Callback],
    data: tuple[Dataset, Dataset] | None,
) -> None:
    """Go through the phases of a run; `survival` has the attempt before, if there was one."""
    before = None if survival is None else survival.job
    cupy = _configure(config, comm)
    comm, threads = _communicate(config, comm, cupy)
    _fetch(config, comm, again=survival is not None and bool(survival.failures))
    config = _choose_strategy(config, comm, threads)
    mesh = together(comm, create_mesh, config.parallel, comm)
    known = None if survival is None else survival.directory
    # BLAS has one thread, so that the order of its sums does not depend on their number.
    with (
        mesh or contextlib.nullcontext(),
        run_directory(config, comm, known) as directory,
        limit_blas_threads(1),
    ):
        if survival is not None:
            survival.config, survival.directory = config, directory
        if comm.supervision is not None and not config.evaluate_only:
            comm.supervision.folder = directory / FLIGHT
        if before is not None:
            data = before.train, before.validation
        elif data is None:
            data = together(comm, share_data, config, comm)
        examine(comm, *data, threads=config.loader_threads)
        job = together(comm, create_job, config, comm, threads, directory, mesh, data, survival)
        _check_backends(job)
        if before is None:
            job.trainer.callbacks.extend(callbacks)
            _introduce(job)
        if survival is not None:
            survival.job = job
        with _recorded(comm, job):
            complete = _load(job)
            results, trace = _train(job, complete)
            _save(job)
            _report(job, complete, results, trace)


def _configure(config: TrainConfig, comm: Communicator) -> Any:
    """Check that all ranks have the same options and hardware; return CuPy, or None without GPU."""
    _require_equal(comm, {"pydtnn": __version__, **asdict(config)})
    if comm.supervision is not None and config.grace is not None:
        comm.supervision.prepare_for_preemption(config.grace)
    cupy = together(comm, take_gpu, config, comm)
    if config.equal_bytes:  # other kernels would round differently
        facts = {"CPU": cpu_model(), "NumPy": np.__version__}
        _require_equal(comm, facts if cupy is None else facts | gpu_facts(cupy))
    return cupy


def _communicate(config: TrainConfig, comm: Communicator, cupy: Any) -> tuple[Communicator, int]:
    """Return the communicator that the options describe, and the number of threads of a rank."""
    # Virtual ranks compute at the same time where their clocks allow it.
    threads = 1 if config.virtual_ranks else together(comm, threads_per_rank, comm)
    comm = together(comm, choose_allreduce, config, comm)
    comm = together(comm, choose_transport, config, comm, cupy)
    if cupy is not None and (shared := shared_gpu(comm, cupy)):
        _print_line(config, comm, f"{shared}, which reduces the speed of each")
    return comm, config.threads or threads


def _fetch(config: TrainConfig, comm: Communicator, *, again: bool) -> None:
    """Check the options of `--trace`, unless an attempt before has, and download data."""
    if config.trace is not None and not again:
        tool = together(comm, find_tool, "tracing", "train: --trace")
        tool.prepare(config, comm)
    if config.download:
        supervision = comm.supervision
        with phase(supervision.activity if supervision else None, "download"):  # has no deadline
            together(comm, fetch_data, config, comm)


def _choose_strategy(config: TrainConfig, comm: Communicator, threads: int) -> TrainConfig:
    """Return the configuration with the strategy that is predicted to be fastest, for "auto"."""
    if AUTO_PARALLEL not in (config.parallel, config.pipeline_schedule):
        return config
    tool = together(comm, find_tool, "predictions", "train: the choice of a strategy (auto)")
    chosen: TrainConfig
    chosen, why = together(comm, tool.choose_parallel, config, comm, threads)
    for line in why:
        _print_line(chosen, comm, line)
    return chosen


def _check_backends(job: Job) -> None:
    """Check that all ranks compute alike."""
    comm, backend = job.trainer.comm, job.trainer.model.backend
    _require_equal(comm, {"instruction set": backend.isa, "tuning": backend.autotuner.mode})
    if job.config.equal_bytes:
        names = {"libraries of the GPU": "versions", "TF32": "tf32"}
        _require_equal(comm, {key: getattr(backend, name, None) for key, name in names.items()})


def _introduce(job: Job) -> None:
    """Print the header and predict time and memory, before the first attempt."""
    config, comm = job.config, job.trainer.comm
    for line in align(describe_job(job), 2):
        _print_line(config, comm, line)
    log_details(job)
    if (tool := find_tool("predictions")) is not None:
        steps, threads = config.epochs * job.steps_per_epoch, job.trainer.model.backend.threads
        given = config, job.work, comm, threads, steps, job.meter
        job.predicted = together(comm, tool.predict_run, *given)
    job.sent_before = comm.traffic.bytes


@contextlib.contextmanager
def _recorded(comm: Communicator, job: Job) -> Iterator[None]:
    """Context in which an error that all ranks raise, or the only one, stores flight records.

    Training must have begun. Errors of one of several ranks, and ends by a signal, do so elsewhere
    or not at all.
    """
    try:
        yield
    except (Interrupted, NotSavedError):
        raise
    except Exception as error:
        agreed = isinstance(error, AgreedError) and comm.rank == 0
        if job.about and comm.supervision is not None and (agreed or comm.size == 1):
            comm.supervision.record(describe(error))
        raise


def _load(job: Job) -> bool:
    """Load the state of an attempt before or a checkpoint; return whether the run is complete."""
    config, trainer = job.config, job.trainer
    if job.survival is not None and job.survival.recovers(trainer):
        return False
    if config.load_options:
        _print_line(config, trainer.comm, str(job.loaded))
    if config.resume:
        _resume(job)
    return not config.evaluate_only and trainer.epoch >= config.epochs


def _train(job: Job, complete: bool) -> tuple[Logs, Any]:
    """Train or evaluate; return the results of an evaluation, and the trace, if there are any."""
    config, trainer, results = job.config, job.trainer, Logs()
    if complete:
        _print_line(
            config,
            trainer.comm,
            f"the run is complete: {trainer.epoch} of {config.epochs} epochs; add "
            f"--epochs {2 * trainer.epoch} to train on",
        )
        return results, None
    for callback in trainer.callbacks:
        if isinstance(callback, RunFolder):
            callback.begin = partial(write_run_files, job)
    context = contextlib.nullcontext()
    if job.recorder is not None:
        context = find_tool("tracing").traced(job)
    with context as trace:
        if config.evaluate_only:
            results = trainer.evaluate(job.validation, global_batch_size=job.work.batch)
            return results, trace
        trainer.fit(
            job.train,
            job.validation,
            epochs=config.epochs,
            global_batch_size=job.work.batch,
            **changes_of(config),
            steps_per_epoch=config.steps_per_epoch,
            drop_last=config.drop_last,
            seed=config.seed,
            loader_threads=0 if config.virtual_ranks else config.loader_threads,
        )
    write_if_possible(trainer.comm, write_end, job)
    return results, trace


def _save(job: Job) -> None:
    """Write the final model or its weights."""
    config, trainer = job.config, job.trainer
    if config.save and config.saves_weights:
        with evaluated(trainer):
            state = trainer.model.state()
            on_rank_0(trainer.comm, write_weights, state, config.save)
    elif config.save:
        trainer.save(config.save)


def _report(job: Job, complete: bool, results: Logs, trace: Any) -> None:
    """Print results, and check that the last checkpoint was written."""
    config, trainer = job.config, job.trainer
    if config.evaluate_only or config.quiet or complete:
        if trainer.comm.rank == 0:
            print(format_logs(results if config.evaluate_only else trainer.history[-1]), flush=True)
    else:
        print_report(job)
        write_if_possible(trainer.comm, write_end, job)  # with the measured times
        results = Logs((n, value) for n, value in trainer.logs.items() if n.startswith(VALIDATION))
    for line in format_arrays(results, job.validation.class_names):
        _print_line(config, trainer.comm, line)
    if trace is not None:
        _print_line(config, trainer.comm, str(trace))
    for callback in trainer.callbacks:
        if isinstance(callback, Checkpointer):
            callback.check_written()


def _resume(job: Job) -> None:
    """Load the checkpoint of `--resume`, if there is one."""
    path = load_checkpoint(job.directory, job.trainer)
    if path is not None:
        verb = "evaluating" if job.config.evaluate_only else "continuing from"
        _print_line(job.config, job.trainer.comm, f"{verb} {path}")
    elif job.config.evaluate_only:
        raise AgreedError(
            f"train: --resume: expected a checkpoint in {job.directory}, found none; use --load"
        )
    else:
        line = f"no checkpoint in {job.directory} yet: starting from the beginning"
        _print_line(job.config, job.trainer.comm, line)


def _print_line(config: TrainConfig, comm: Communicator, line: str) -> None:
    if comm.rank == 0 and not config.quiet:
        print(printable(line), flush=True)


def _require_equal(comm: Communicator, facts: dict[str, Any]) -> None:
    """Raise AgreedError if ranks were started with different options or on different hardware."""
    advice = "start them with one command, on machines of one kind"
    require_equal(comm, "train", facts, advice)
