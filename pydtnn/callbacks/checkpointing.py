"""Checkpoints at regular intervals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydtnn.comm.agree import on_rank_0
from pydtnn.training.callback import Callback, Training
from pydtnn.training.checkpoint import find_checkpoints, save_checkpoint
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.validate import check_int


class Checkpointer(Callback):
    """Save a checkpoint after every few epochs, every few steps or both, and at the end.

    It must follow the callbacks with state, so that their saved state includes the completed epoch.

    Parameters
    ----------
    directory : str or Path
        Folder of the run, for ``checkpoint-<step>``; created if necessary.
    every_epochs, every_steps : int, optional
        Intervals; steps are counted from the beginning of training.
    keep : int
        Number of checkpoints to keep.
    config : mapping, optional
        Saved with each checkpoint, see `pydtnn.training.checkpoint.save_checkpoint`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every_epochs: int | None = 1,
        every_steps: int | None = None,
        keep: int = 3,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if every_epochs is None and every_steps is None:
            raise ValueError(
                "Checkpointer: expected every_epochs or every_steps, got neither; set one of them"
            )
        for name, interval in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if interval is not None:
                check_int("Checkpointer", name, interval, at_least=1)
        self.directory = Path(directory)
        self.every_epochs = every_epochs
        self.every_steps = every_steps
        self.keep = check_int("Checkpointer", "keep", keep, at_least=1)
        self.config = config
        self._saved = (0, 0)  # epoch and step of the last checkpoint, or of the start

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Check the folder and the order of callbacks. Collective: all ranks call it.

        Raises
        ------
        AgreedError
            On all ranks, if a new training starts in a folder with checkpoints, or if a callback
            with state follows.
        """
        for callback in trainer.callbacks[trainer.callbacks.index(self) + 1 :]:
            if callback.state():
                name = type(callback).__name__
                raise AgreedError(
                    f"Checkpointer: must be the last callback, but {name} comes after it and would "
                    "miss an epoch after resuming; put the Checkpointer last"
                )
        self._saved = (trainer.epoch, trainer.step)
        if self._saved == (0, 0):
            on_rank_0(trainer.comm, self._check_folder)

    def _check_folder(self) -> None:
        others = find_checkpoints(self.directory)
        if others:
            raise FileExistsError(
                f"Checkpointer: {self.directory} contains {others[-1].name} of another run; "
                "resume from it, or choose another folder"
            )

    def on_step_end(self, trainer: Training) -> None:
        """Save if it is time. Collective: all ranks call it."""
        if self.every_steps and trainer.optimizer.iterations % self.every_steps == 0:
            self._save(trainer)

    def on_epoch_end(self, trainer: Training) -> None:
        """Save if it is time. Collective: all ranks call it."""
        if self.every_epochs and trainer.epoch % self.every_epochs == 0:
            self._save(trainer)

    def on_fit_end(self, trainer: Training) -> None:
        """Save the last state if it is not saved. Collective: all ranks call it."""
        self._save(trainer)

    def on_interrupt(self, trainer: Training) -> None:
        """Save the state after the last step. Collective: all ranks call it."""
        self._save(trainer)

    def _save(self, trainer: Training) -> None:
        position = trainer.epoch, trainer.step
        if position != self._saved:
            save_checkpoint(self.directory, trainer, config=self.config, keep=self.keep)
            self._saved = position
