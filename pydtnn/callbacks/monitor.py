"""Callbacks that monitor one value of the logs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from pydtnn.training.callback import Callback, Training
from pydtnn.training.logs import VALIDATION, missing
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.validate import check_float, check_int


class Monitor(Callback):
    """Monitor one value over epochs; a subclass implements the action in `on_value`.

    Parameters
    ----------
    monitor : str
        "loss" or a metric's name, with the prefix "val_" for validation.
    mode : {"min", "max"}, optional
        Whether smaller or larger is better; by default that of the metric, and "min" for the loss.
    min_delta : float
        Minimum improvement over the best value. NaN is never an improvement.

    Attributes
    ----------
    best : float or None
        The best value so far.
    waited : int
        Epochs since the best value.
    """

    def __init__(self, monitor: str, mode: str | None = None, min_delta: float = 0.0) -> None:
        if mode not in (None, "min", "max"):
            raise ValueError(f"{type(self).__name__}: mode must be 'min' or 'max', got {mode!r}")
        self.monitor = monitor
        self.mode = mode
        self.min_delta = check_float(type(self).__name__, "min_delta", min_delta, at_least=0)
        self.best: float | None = None
        self.waited = 0

    @abstractmethod
    def on_value(self, trainer: Training, value: float, improved: bool) -> None:
        """Act on an epoch's value; `best` and `waited` are up to date.

        Parameters
        ----------
        trainer : Trainer
        value : float
            The monitored value, equal on all ranks.
        improved : bool
            Whether it is the best so far.
        """

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Raise AgreedError if the logs will not contain the monitored value.

        Raises
        ------
        AgreedError
            On all ranks, with the available names.
        """
        better = trainer.objective.better
        self._check(self.monitor, [*better, *(VALIDATION + name for name in better)])
        if self.mode is None:
            self.mode = better.get(self.monitor.removeprefix(VALIDATION), "min")

    def on_epoch_end(self, trainer: Training) -> None:
        """Compare the epoch's value with the best and call `on_value`."""
        # Values of the validation are missing without a validation set, which is known only here.
        self._check(self.monitor, [name for name in trainer.logs if name != "lr"])
        value = trainer.logs[self.monitor]
        improved = self._better(value)
        if improved:
            self.best = value
        self.waited = 0 if improved else self.waited + 1
        self.on_value(trainer, value, improved)

    def _check(self, name: str, choices: list[str]) -> None:
        if name not in choices:
            _, _, hint = missing(name, choices).partition("; ")
            raise AgreedError(
                f"{type(self).__name__}: monitor must be one of {', '.join(choices)}, got {name!r}"
                f"{'; ' * bool(hint)}{hint}"
            )

    def _better(self, value: float) -> bool:
        if self.best is None:
            return value == value  # not NaN
        gain = value - self.best if self.mode == "max" else self.best - value
        return gain > self.min_delta

    def state(self) -> dict[str, Any]:
        """Return the best value and the number of epochs since."""
        return {"best": self.best, "waited": self.waited}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`; nothing is changed if it is invalid."""
        who, best = type(self).__name__, state["best"]
        if best is not None and (isinstance(best, bool) or not isinstance(best, int | float)):
            raise TypeError(f"{who}: the saved best value must be a number, got {best!r}")
        self.best, self.waited = best, check_int(who, "waited", state["waited"], at_least=0)
