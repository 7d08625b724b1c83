"""What a run prints before the first step, and its logs on the standard error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydtnn import __version__
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.mesh import describe_mesh
from pydtnn.cli.options import flags, typed

if TYPE_CHECKING:
    from pydtnn.cli.build import Job


import contextlib
import logging
from collections.abc import Iterator

SHOWN = ("model", "dataset", "output_dir", "resume", "evaluate_only", "progress", "verbose")
"""Options that other lines of the header show, or that the user sees."""


def first_line(config: TrainConfig, ranks: int) -> str:
    """Return the line that is printed at once, before anything that takes time."""
    what = "evaluation" if config.evaluate_only else "training"
    return (
        f"pydtnn {__version__}: {what} of {config.model} on {config.dataset}, "
        f"{_count(ranks, 'rank')}"
    )


def describe_job(job: Job) -> list[tuple[str, str]]:
    """Return name and value of the header's lines."""
    config, trainer = job.config, job.trainer
    model, comm = trainer.model, trainer.comm
    backend = model.backend
    parameters, ranks = model.whole.size, trainer.setup.data.size
    shape = " x ".join(map(str, job.train.input_shape))
    total, hosts = job.work.batch, len(set(comm.hosts))
    samples = f"{len(job.train):,} training and {len(job.validation):,} validation samples"
    device = f"{backend.name} ({backend.isa})" if backend.isa else backend.name
    threads = "" if backend.name == "cuda" else f" x {_count(backend.threads, 'thread')}"
    rows = [
        ("model", f"{config.model}, {parameters:,} parameters"),
        ("data", f"{job.train.name}, {samples} of {shape}, {job.train.classes} classes"),
    ]
    if not config.evaluate_only:
        steps = f"{_count(config.epochs, 'epoch')} of {_count(job.steps_per_epoch, 'step')}"
        rows.append(("batch", f"{-(-total // ranks)} per rank, {total} in total; {steps}"))
    rows += [
        ("ranks", f"{comm.size}{threads} on {_count(hosts, 'host')}"),
        ("device", f"{device}, {model.dtype.name}"),
    ]
    if trainer.setup.mesh is not None:
        rows.insert(-1, ("mesh", describe_mesh(trainer.setup.mesh)))
    if options := not_default(config):
        rows.append(("options", options))
    if not config.evaluate_only:
        rows.append(("run folder", str(job.directory)))
    return rows


def not_default(config: TrainConfig) -> str:
    """Return the options that differ from the defaults, as they are typed.

    >>> not_default(TrainConfig(epochs=8, augment="crop:4,flip", overlap=False))
    '--epochs 8 --augment crop:4,flip --no-overlap'
    """
    usual = flags(TrainConfig).items()
    names = [name for name, own in usual if getattr(config, name) != own.default]
    return " ".join(typed(config, name) for name in names if name not in SHOWN)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


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
    handler.setFormatter(logging.Formatter(text))
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
