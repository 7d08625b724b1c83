"""Callbacks that end training."""

from __future__ import annotations

from pydtnn.callbacks.monitor import Monitor
from pydtnn.training.callback import Training
from pydtnn.utils.validate import number, whole


class EarlyStopping(Monitor):
    """End training when a value has not become better for some epochs.

    Parameters
    ----------
    monitor : str
        "loss" or a metric's name, of the validation where it begins with "val_".
    patience : int
        Epochs without a better value.
    min_delta : float
        How much better than the best a value must be to count.
    mode : {"min", "max"}, optional
        Which way is better; by default as the metric says.

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
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience = whole("EarlyStopping", "patience", patience, at_least=1)

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Stop at once where a run that is resumed had come to its end."""
        super().on_fit_start(trainer, epochs, steps)
        self._stop_in_time(trainer)

    def on_value(self, trainer: Training, value: float, improved: bool) -> None:
        """Stop when patience has run out."""
        self._stop_in_time(trainer)

    def _stop_in_time(self, trainer: Training) -> None:
        if self.waited >= self.patience:
            trainer.stop = True


class StopAtMetric(Monitor):
    """End training when a value is as good as wanted.

    Parameters
    ----------
    monitor : str
        "loss" or a metric's name, of the validation where it begins with "val_".
    value : float
        How good it must be.
    mode : {"min", "max"}, optional
        Which way is better; by default as the metric says.
    """

    def __init__(self, monitor: str, value: float, mode: str | None = None) -> None:
        super().__init__(monitor, mode)
        self.value = number("StopAtMetric", "value", value)

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Stop at once where a run that is resumed had come to its end."""
        super().on_fit_start(trainer, epochs, steps)
        self._stop_in_time(trainer)

    def on_value(self, trainer: Training, value: float, improved: bool) -> None:
        """Stop when the value is reached."""
        self._stop_in_time(trainer)

    def _stop_in_time(self, trainer: Training) -> None:
        if self.best is None:
            return
        if self.best >= self.value if self.mode == "max" else self.best <= self.value:
            trainer.stop = True
