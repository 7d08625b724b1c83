"""Checkpoints at regular intervals."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydtnn.comm.agree import on_rank_0
from pydtnn.training.callback import Callback, Training
from pydtnn.training.checkpoint import find_checkpoints
from pydtnn.training.checkpoint.folder import checkpoint_path
from pydtnn.training.checkpoint.saving import Saver, last_good
from pydtnn.training.checkpoint.timer import Timer
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError, NotSavedError
from pydtnn.utils.interval import DEFAULT_MTBF, Interval, parse_interval
from pydtnn.utils.units import duration, parse_quantity
from pydtnn.utils.validate import check_int

_log = logging.getLogger("pydtnn.training.checkpoint")

LEAST_WAIT_S = 1.0
"""Seconds of waiting for the checkpoint before that are reported."""


class Checkpointer(Callback):
    """Save a checkpoint at intervals, and at the end.

    Checkpoints are copied after a step and written while training continues; the last one, also
    after a signal, is written at once. One that cannot be written is a warning with the last good
    one, and training continues: see `check_written`. It must follow the callbacks with state, so
    that their saved state includes the completed epoch.

    Parameters
    ----------
    directory : str or Path
        Folder of the run, for ``checkpoint-<step>``; created if necessary.
    every_epochs, every_steps : int, optional
        Intervals; steps are counted from the beginning of training.
    every : str, optional
        Instead of these: a time ("5min"), "200 steps", "2 epochs", or "auto", the interval that
        wastes least time by the measured cost of a checkpoint and `mtbf` (Young, 1974; Daly, 2006).
    keep : int
        Number of checkpoints to keep.
    background : bool
        Whether training continues while checkpoints are flushed to the disk.
    mtbf : str
        Mean time between two failures of the run, for "auto".
    config : mapping, optional
        Saved with each checkpoint, see `pydtnn.training.checkpoint.save_checkpoint`.

    Attributes
    ----------
    error : str or None
        Why the last checkpoint could not be written.
    written : int
        Checkpoints that are known to be complete.
    blocked, waited : float
        Seconds for which training stood still for checkpoints so far, and of these for which it
        waited for the one before.
    """

    reads_gradients = False

    def __init__(
        self,
        directory: str | Path,
        *,
        every_epochs: int | None = 1,
        every_steps: int | None = None,
        every: str | None = None,
        keep: int = 3,
        background: bool = True,
        mtbf: str = DEFAULT_MTBF,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if every_epochs is None and every_steps is None and every is None:
            raise ValueError(
                "Checkpointer: expected every_epochs or every_steps, got neither; set one of them"
            )
        for name, interval in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if interval is not None:
                check_int("Checkpointer", name, interval, at_least=1)
        self.directory = Path(directory)
        self.every = every
        self.every_epochs, self.every_steps = every_epochs, every_steps
        self.interval = Interval(every_steps, every_epochs)
        if every is not None:
            self.interval = parse_interval("Checkpointer: every", every)
        self.keep = check_int("Checkpointer", "keep", keep, at_least=1)
        self.background = background
        self.mtbf = mtbf
        self._mtbf_s = parse_quantity("Checkpointer: mtbf", mtbf, "s")
        self.config = config
        self.error: str | None = None
        self.written = 0
        self.blocked = self.waited = 0.0
        self._saved = (0, 0)  # epoch and step of the last checkpoint, or of the start
        self._comm: Any = None
        self._saver: Saver
        self._timer: Timer | None = None

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
            if not trainer.recovered:
                self.error, self.written = None, 0
                on_rank_0(trainer.comm, self._check_folder)
        elif not any(trainer.comm.gather_object(self._is_saved(trainer))):
            self._saved = (0, 0)  # a rank has failed before the checkpoint was complete
        self._saver = Saver(self.directory, config=self.config, keep=self.keep, on_error=self._warn)
        self._comm = trainer.comm
        if self.interval.seconds is not None or self.interval.auto:
            self._timer = Timer(self.interval.seconds, self._mtbf_s)

    def _is_saved(self, trainer: Training) -> bool:
        """Return whether there is a checkpoint of this step, on rank 0."""
        path = checkpoint_path(self.directory, trainer.optimizer.iterations)
        return trainer.comm.rank == 0 and path.exists()

    def _check_folder(self) -> None:
        others = find_checkpoints(self.directory)
        if others:
            raise FileExistsError(
                f"Checkpointer: {self.directory} contains {others[-1].name} of another run; "
                "resume from it, or choose another folder"
            )

    def on_step_end(self, trainer: Training) -> None:
        """Save if it is time. Collective: all ranks call it."""
        self._saver.poll(self._comm)
        steps = self.interval.steps
        if (steps and trainer.optimizer.iterations % steps == 0) or (
            self._timer is not None and self._timer.is_due(trainer.comm)
        ):
            self._save(trainer, background=self.background)

    def on_epoch_end(self, trainer: Training) -> None:
        """Save if it is time. Collective: all ranks call it."""
        self._saver.poll(self._comm)
        if self.interval.epochs and trainer.epoch % self.interval.epochs == 0:
            self._save(trainer, background=self.background)

    def on_fit_end(self, trainer: Training) -> None:
        """Save the last state if it is not saved. Collective: all ranks call it."""
        self._save(trainer, background=False)

    on_interrupt = on_fit_end

    def close(self) -> None:
        """Complete the checkpoint that is being written, if that needs no other rank."""
        if self._comm is not None:
            self._saver.abandon(self._comm)

    def check_written(self) -> None:
        """Raise NotSavedError if training has ended and no checkpoint could be written.

        Raises
        ------
        NotSavedError
            On all ranks.
        """
        if self.error is not None and self.written == 0:
            raise NotSavedError(f"no checkpoint could be written: {self.error}")

    def _save(self, trainer: Training, *, background: bool) -> None:
        saver, position = self._saver, (trainer.epoch, trainer.step)
        if position != self._saved:
            waited = self._settle(trainer)
            if waited > LEAST_WAIT_S and trainer.comm.rank == 0:
                _log.warning(
                    "training has waited %s for the checkpoint before, which was still being "
                    "written; save less often",
                    duration(waited),
                )
            virtual = clock.virtual() is not None  # ranks are threads, which wait for each other
            self.error = saver.start(trainer, background=background and not virtual)
            if self.error is None:
                self._saved = position
            self.waited += waited
            self.blocked += waited + saver.blocked
            if self._timer is not None:
                self._timer.restart(saver.blocked, saver.written)
        if not background:
            self._settle(trainer)
        if clock.virtual():
            trainer.comm.barrier()  # steps do not wait for ranks that still gather

    def _settle(self, trainer: Training) -> float:
        """Wait for the checkpoint that is being written; return for how long, in s."""
        if self._saver.pending is None:
            return 0.0
        begin = clock.now()
        with trainer.setup.phase("checkpoint end"):
            self.error = self._saver.settle(self._comm)
        self.written += self.error is None
        return clock.now() - begin

    def _warn(self, reason: str) -> None:
        _log.warning("%s; training continues, and %s", reason, last_good(self.directory))
