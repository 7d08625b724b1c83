"""Train a network from the command line: ``python -m pydtnn.train --help``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pydtnn.comm import Communicator, agree, create_communicator
from pydtnn.command_line import parse
from pydtnn.config import TrainConfig
from pydtnn.errors import EXPLAINED, AgreedError, describe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, 0 if all went well.

    Collective: all ranks call it.
    """
    try:
        comm = create_communicator()
    except EXPLAINED as error:
        print(describe(error), file=sys.stderr)
        return 2
    try:
        config = _together(comm, _parse, comm, arguments)
        _run(config, create_communicator(config.comm) if config.comm != "auto" else comm)
    except AgreedError as error:  # all ranks have it, one tells
        if comm.rank == 0:
            print(describe(error), file=sys.stderr)
        return 2
    except EXPLAINED as error:
        if comm.size > 1:
            raise  # the communicator's hook tells it and ends the other ranks
        print(describe(error), file=sys.stderr)
        return 1
    return 0


def _parse(comm: Communicator, arguments: Sequence[str] | None) -> TrainConfig:
    with contextlib.ExitStack() as stack:
        if comm.rank > 0:  # the help is for one reader
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        return parse(arguments)


def _run(config: TrainConfig, comm: Communicator) -> None:
    from pydtnn.checkpoint import load_checkpoint
    from pydtnn.job import create_job
    from pydtnn.report import print_report, write_run_file
    from pydtnn.run_directory import run_directory
    from pydtnn.threads import limit_blas_threads, threads_per_rank
    from pydtnn.weights import save_weights

    threads = config.threads or threads_per_rank(comm)
    limit_blas_threads(threads)
    directory = run_directory(config, comm)
    job = _together(comm, create_job, config, comm, threads, directory)
    trainer = job.trainer
    if config.evaluate_only:
        results = trainer.evaluate(job.validation)
        if comm.rank == 0:
            print("  ".join(f"{name} {value:.4f}" for name, value in results.items()))
        return
    write_run_file(job)
    if config.resume:
        load_checkpoint(directory, trainer)
    trainer.fit(
        job.train,
        job.validation,
        epochs=config.epochs,
        global_batch_size=job.global_batch_size,
        augment=job.augment,
        steps_per_epoch=config.steps_per_epoch,
        seed=config.seed,
        loader_threads=config.loader_threads,
    )
    if config.save and comm.rank == 0:
        save_weights(trainer.model, config.save)
    print_report(job)


def _together(comm: Communicator, work: Callable[..., Any], *args: Any) -> Any:
    """Do work that every rank does for itself; if it fails anywhere, all ranks raise the same `AgreedError`."""
    result, problem = None, None
    try:
        result = work(*args)
    except EXPLAINED as error:
        problem = error
    agree(comm, problem)
    return result


if __name__ == "__main__":
    sys.exit(main())
