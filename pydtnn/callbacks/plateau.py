"""Reduction of the learning rate when a value stops improving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydtnn.callbacks.monitor import Monitor
from pydtnn.training.callback import Training
from pydtnn.utils.validate import check_float, check_int


class ReduceOnPlateau(Monitor):
    """Multiply the learning rate by a factor when a value has not improved for some epochs.

    It changes ``optimizer.lr_factor``, which is applied to any schedule.

    Parameters
    ----------
    monitor : str
        "loss" or a metric's name, with the prefix ``val_`` for validation.
    factor : float
        Between 0 and 1.
    patience : int
        Allowed epochs without improvement; the rate is reduced after the next one, as in PyTorch's
        ``ReduceLROnPlateau`` (Keras's reduces one epoch earlier).
    min_factor : float
        Lower bound of the product of all reductions.
    cooldown : int
        Epochs after a reduction that are not counted.
    min_delta : float
        Minimum improvement over the best value.
    mode : {"min", "max"}, optional
        Whether smaller or larger is better; by default that of the metric.
    """

    reads_gradients = False

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        min_factor: float = 0.0,
        cooldown: int = 0,
        min_delta: float = 0.0,
        mode: str | None = None,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        who = type(self).__name__
        self.factor = check_float(who, "factor", factor, above=0, below=1)
        self.patience = check_int(who, "patience", patience, at_least=0)
        self.min_factor = check_float(who, "min_factor", min_factor, at_least=0, at_most=1)
        self.cooldown = check_int(who, "cooldown", cooldown, at_least=0)
        self.cooling = 0

    def on_value(self, trainer: Training, value: float, improved: bool) -> None:
        """Reduce after `patience` epochs without improvement, except during the cooldown."""
        if self.cooling > 0:
            self.cooling -= 1
            self.waited = 0
        if self.waited > self.patience:
            optimizer = trainer.optimizer
            lowest = min(self.min_factor, optimizer.lr_factor)
            optimizer.lr_factor = max(optimizer.lr_factor * self.factor, lowest)
            self.cooling = self.cooldown
            self.waited = 0

    def state(self) -> dict[str, Any]:
        """Return the best value, the number of epochs since, and the remaining cooldown."""
        return {**super().state(), "cooling": self.cooling}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`; nothing is changed if it is invalid."""
        cooling = check_int(type(self).__name__, "cooling", state["cooling"], at_least=0)
        super().load(state)
        self.cooling = cooling
