"""Callbacks that monitor one value of the logs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from pydtnn.training.callback import Callback, Training, evaluated
from pydtnn.training.logs import VALIDATION, missing
from pydtnn.utils.errors import AgreedError, RankFailure
from pydtnn.utils.validate import check_bool, check_float, check_int

WEIGHTS = "weights"
"""Prefix of the arrays of the best epoch in the saved state."""


class Monitor(Callback):
    """Monitor one value over epochs; a subclass implements the action in `on_value`.

    Parameters
    ----------
    monitor : str
        "loss" or a metric's name, with the prefix ``val_`` for validation.
    mode : {"min", "max"}, optional
        Whether smaller or larger is better; by default that of the metric, and "min" for the loss.
    min_delta : float
        Minimum improvement over the best value. NaN is never an improvement.
    restore_best : bool
        Whether the model has the weights of the best epoch at the end of `fit`: those that were
        evaluated. They are kept in memory, and saved with checkpoints. A further `fit` continues
        from them.

    Attributes
    ----------
    best : float or None
        The best value so far.
    waited : int
        Epochs since the best value.
    """

    def __init__(
        self,
        monitor: str,
        mode: str | None = None,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        if mode not in (None, "min", "max"):
            raise ValueError(f"{type(self).__name__}: mode must be 'min' or 'max', got {mode!r}")
        self.monitor = monitor
        self.mode = self._given_mode = mode
        self.min_delta = check_float(type(self).__name__, "min_delta", min_delta, at_least=0)
        self.restore_best = check_bool(type(self).__name__, "restore_best", restore_best)
        self.best: float | None = None
        self._weights: dict[str, np.ndarray] = {}  # this rank's, of the best epoch
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
        if self._given_mode is None:
            self.mode = better.get(self.monitor.removeprefix(VALIDATION), "min")

    def on_epoch_end(self, trainer: Training) -> None:
        """Compare the epoch's value with the best and call `on_value`."""
        # Values of the validation are missing without a validation set, which is known only here.
        self._check(self.monitor, [name for name in trainer.logs if name != "lr"])
        value = trainer.logs[self.monitor]
        improved, before = self._better(value), (self.best, self.waited)
        if improved:
            self.best = value
        self.waited = 0 if improved else self.waited + 1
        try:
            if improved:
                self._keep_weights(trainer)
            self.on_value(trainer, value, improved)
        except RankFailure:  # the epoch ends again without the rank that has failed
            self.best, self.waited = before
            raise

    def finish(self, trainer: Training) -> None:
        """Restore the weights of the best epoch. Collective: all ranks call it."""
        if self._weights:
            trainer.model.load(trainer.model.whole.gather(self._weights))

    def _keep_weights(self, trainer: Training) -> None:
        if self.restore_best:
            with evaluated(trainer):
                own = trainer.model.whole.take(trainer.model.state())
                self._weights = {name: np.array(value) for name, value in own.items()}

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
        """Return the best value, the number of epochs since, and the weights to restore."""
        weights = {f"{WEIGHTS}/{name}": value for name, value in self._weights.items()}
        return {"best": self.best, "waited": self.waited} | weights

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state returned by `state`; nothing is changed if it is invalid."""
        who, best = type(self).__name__, state["best"]
        if best is not None and (isinstance(best, bool) or not isinstance(best, int | float)):
            raise TypeError(f"{who}: the saved best value must be a number, got {best!r}")
        weights = {
            name.partition("/")[2]: np.array(value)
            for name, value in state.items()
            if name.startswith(f"{WEIGHTS}/")
        }
        if self.restore_best and best is not None and not weights:
            raise ValueError(
                f"{who}: restore_best requires the weights of the best epoch, which were not saved "
                "without it; continue without restore_best, or load the file of BestWeights"
            )
        if self.restore_best:
            self._weights = weights
        self.best, self.waited = best, check_int(who, "waited", state["waited"], at_least=0)
