"""The base class of callbacks, and what they see of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pydtnn.comm.metered import Metered
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer
from pydtnn.optimizers.loss_scale import LossScale
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.training.objective import Objective


class Training(Protocol):
    """What callbacks and checkpoints see of a `Trainer`, which documents it."""

    model: Model
    optimizer: Optimizer
    exchange: GradientExchange
    comm: Metered
    objective: Objective
    loss_scale: LossScale | None
    epoch: int
    step: int
    logs: dict[str, float]
    history: list[dict[str, float]]
    stop: bool
    samples_seen: int

    @property
    def callbacks(self) -> Sequence[Callback]:
        """Those of the trainer."""

    def averaged(self) -> AbstractContextManager[None]:
        """Hold the same parameters and statistics on all ranks, to evaluate or save them."""

    def state(self) -> dict[str, Any]:
        """Where training stands."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned."""


class Callback:
    """Something that follows training; this one does nothing.

    A subclass overrides what it needs. All ranks make the same calls, so what a callback decides
    (to stop, to lower the learning rate) must follow from what is equal on all ranks, such as
    ``trainer.logs`` and ``trainer.history``. What only one rank does, such as writing a file, it
    does under ``trainer.comm.rank == 0``.
    """

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Called when training starts or continues.

        Parameters
        ----------
        trainer : Trainer
        epochs : int
            Epochs that will be complete in the end.
        steps : int
            Steps per epoch.
        """

    def on_epoch_start(self, trainer: Training) -> None:
        """Called when an epoch starts, or continues after resuming."""

    def on_step_end(self, trainer: Training) -> None:
        """Called after a step; ``trainer.logs`` holds this epoch's means so far."""

    def on_epoch_end(self, trainer: Training) -> None:
        """Called after an epoch and its evaluation; ``trainer.logs`` holds its results."""

    def on_fit_end(self, trainer: Training) -> None:
        """Called when training ends."""

    def close(self) -> None:
        """Release resources such as the terminal; called last, also when training fails."""

    def state(self) -> dict[str, Any]:
        """Return what must be saved to continue: arrays by name and JSON values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned."""
