"""Messages of the library on the standard error of a command."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


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
