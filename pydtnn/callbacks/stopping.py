"""Callbacks that stop training or return to the best weights."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from pydtnn.callbacks.monitor import Monitor
from pydtnn.saving.weights import write_weights
from pydtnn.training.callback import Training, evaluated, write_if_possible
from pydtnn.utils.validate import check_float, check_int


class BestWeights(Monitor):
    """Save the weights whenever a value is the best so far.

    Parameters
    ----------
    path : str or Path
        A safetensors file, replaced atomically.
    monitor : str
        "loss" or a metric's name, with the prefix ``val_`` for validation.
    mode : {"min", "max"}, optional
        Whether smaller or larger is better; by default that of the metric.
    restore_best : bool
        Whether the model has these weights at the end of `fit`, see `Monitor`.
    """

    reads_gradients = False

    def __init__(
        self,
        path: str | Path,
        monitor: str = "val_accuracy",
        mode: str | None = None,
        *,
        restore_best: bool = False,
    ) -> None:
        super().__init__(monitor, mode, restore_best=restore_best)
        self.path = Path(path)

    def on_value(self, trainer: Training, value: float, improved: bool) -> None:
        """Save. Collective: all ranks call it; rank 0 writes, or warns if it cannot."""
        if improved:
            with evaluated(trainer):
                state = trainer.model.state()
                write_if_possible(trainer.comm, write_weights, state, self.path)


class _Stopping(Monitor):
    """Stop training when a condition on the monitored value is reached."""

    reads_gradients = False

    @abstractmethod
    def is_reached(self) -> bool:
        """Return whether training is to end."""

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Stop immediately if a resumed run was already complete."""
        super().on_fit_start(trainer, epochs, steps)
        self._stop_in_time(trainer)

    def on_value(self, trainer: Training, value: float, improved: bool) -> None:
        """Stop when the condition is reached."""
        self._stop_in_time(trainer)

    def _stop_in_time(self, trainer: Training) -> None:
        if self.is_reached():
            trainer.stop = True


class EarlyStopping(_Stopping):
    """Stop training when a value has not improved for some epochs.

    Parameters
    ----------
    monitor : str
        "loss" or a metric's name, with the prefix ``val_`` for validation.
    patience : int
        Epochs without improvement.
    min_delta : float
        Minimum improvement over the best value.
    mode : {"min", "max"}, optional
        Whether smaller or larger is better; by default that of the metric.
    restore_best : bool
        Whether the model has the weights of the best epoch at the end of `fit`, see `Monitor`.

    References
    ----------
    Prechelt, "Early Stopping - But When?", 1998, criterion UP with strips of one epoch.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 10,
        min_delta: float = 0.0,
        mode: str | None = None,
        *,
        restore_best: bool = False,
    ) -> None:
        super().__init__(monitor, mode, min_delta, restore_best)
        self.patience = check_int("EarlyStopping", "patience", patience, at_least=1)

    def is_reached(self) -> bool:
        """Return whether `patience` epochs were without improvement."""
        return self.waited >= self.patience


class StopAtMetric(_Stopping):
    """Stop training when a value reaches a target.

    Parameters
    ----------
    monitor : str
        "loss" or a metric's name, with the prefix ``val_`` for validation.
    value : float
        The target.
    mode : {"min", "max"}, optional
        Whether smaller or larger is better; by default that of the metric.
    """

    def __init__(self, monitor: str, value: float, mode: str | None = None) -> None:
        super().__init__(monitor, mode)
        self.value = check_float("StopAtMetric", "value", value)

    def is_reached(self) -> bool:
        """Return whether the best value is at the target or beyond it."""
        if self.best is None:
            return False
        return self.best >= self.value if self.mode == "max" else self.best <= self.value
