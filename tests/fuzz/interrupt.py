"""Runs that end in the middle and are continued."""

from __future__ import annotations

from pathlib import Path

from pydtnn.comm import Communicator
from pydtnn.training.checkpoint import load_checkpoint
from tests.fuzz.training_runs import Result, Run, Way, result
from tests.small_training import Interrupt


def carry_out(run: Run, way: Way, comm: Communicator, folder: Path, at: int = 0) -> Result:
    """Begin or continue a run; return what this rank has at its end.

    Raises
    ------
    Interrupted
        After step `at`, if it is not 0.
    """
    trainer = run.trainer(comm, way, *([Interrupt(at, folder)] if at else []))
    load_checkpoint(folder, trainer)
    run.fit(trainer, way)
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Interrupt)]
    return result(trainer)
