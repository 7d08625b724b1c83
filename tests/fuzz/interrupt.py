"""Runs that end in the middle and are continued."""

from __future__ import annotations

from pathlib import Path

from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.trainer import Trainer
from pydtnn.utils.errors import AgreedError
from tests.fuzz.training_runs import Result, Run, Way, result


class Interrupted(AgreedError):
    """Stands for whatever ends a run, on all ranks."""


class Interrupt(Callback):
    """Saves a checkpoint after so many steps, and ends the run."""

    def __init__(self, directory: Path, at: int) -> None:
        self.directory, self.at = directory, at

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.optimizer.iterations == self.at:
            save_checkpoint(self.directory, trainer)
            raise Interrupted("enough")


def carry_out(run: Run, way: Way, comm: Communicator, folder: Path, at: int = 0) -> Result:
    """Begin or continue a run; return what this rank has at its end.

    Raises
    ------
    Interrupted
        After step `at`, if it is not 0.
    """
    trainer = run.trainer(comm, way, *([Interrupt(folder, at)] if at else []))
    load_checkpoint(folder, trainer)
    run.fit(trainer, way)
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Interrupt)]
    return result(trainer)
