"""The learning rate of an optimizer."""

from __future__ import annotations

from pydtnn.schedules import Constant, Schedule
from pydtnn.utils.validate import number


class LearningRate:
    """Base class of `Optimizer`: the learning rate of each update.

    Attributes
    ----------
    schedule : Schedule
        Function of the number of the update, from 0.
    lr_factor : float
        Factor on it.
    iterations : int
        Updates made.
    """

    schedule: Schedule
    lr_factor: float
    iterations: int

    @property
    def lr(self) -> float:
        """Learning rate of the last update; assigning it replaces the schedule by a constant.

        Checkpoints do not contain the schedule: a run that is to be continued with another rate
        uses a schedule or `lr_factor`.
        """
        return self.lr_now

    @lr.setter
    def lr(self, value: float) -> None:
        self.schedule = Constant(
            number(type(self).__name__, "lr (the learning rate)", value, at_least=0)
        )
        self.lr_factor = 1.0

    @property
    def lr_now(self) -> float:
        """Learning rate of the last update; before the first update, of the first."""
        return self.lr_of(max(self.iterations - 1, 0))

    def lr_of(self, step: int) -> float:
        """Return the learning rate of update number `step`, from 0."""
        lr = number(
            type(self).__name__,
            f"lr of the schedule at step {step}",
            self.schedule(step),
            at_least=0,
        )
        return lr * self.lr_factor
