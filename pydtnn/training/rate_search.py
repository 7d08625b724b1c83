"""Search for a learning rate: a short training with an increasing rate, which leaves no traces."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.data import Dataset
from pydtnn.training.callback import Callback, Training
from pydtnn.training.checkpoint import Stateful
from pydtnn.training.nonfinite import NotFiniteError
from pydtnn.training.trainer import Trainer
from pydtnn.utils.collective import collective
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.figures import save_figure
from pydtnn.utils.validate import check_float, check_int

SMOOTHING_PARTS = 10
"""The losses are smoothed over a tenth of the steps."""


@dataclass(frozen=True)
class LearningRates:
    """Learning rates and the losses of the steps that were made with them.

    Attributes
    ----------
    rates : ndarray of float64, shape (n,)
    losses : ndarray of float64, shape (n,)
        Mean loss of the batch of all ranks before the update with this rate.
    """

    rates: np.ndarray
    losses: np.ndarray

    def smoothed(self) -> tuple[np.ndarray, np.ndarray]:
        """Return geometric means of neighbouring rates, and means of their losses."""
        width = max(len(self.rates) // SMOOTHING_PARTS, 1)
        window = np.full(width, 1 / width)
        rates = np.exp(np.convolve(np.log(self.rates), window, "valid"))
        return rates, np.convolve(self.losses, window, "valid")

    @property
    def suggestion(self) -> float | None:
        """Rate at which the smoothed loss decreases fastest over the logarithm of the rate.

        None if the loss does not decrease, or there are fewer than three points.
        """
        rates, losses = self.smoothed()
        end = int(losses.argmin()) + 1  # beyond the minimum, noise may decrease faster
        if end < 3:
            return None
        slope = np.gradient(losses[:end], np.log(rates[:end]))
        return float(rates[slope.argmin()])

    def plot(self, path: str | Path) -> None:
        """Draw the losses over the rates, and the suggestion, with matplotlib.

        Parameters
        ----------
        path : str or Path
            Its name ends in ".png", ".pdf" or ".svg".

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        OSError
            If the file cannot be written.
        ValueError
            If the kind of file is not supported.
        """
        save_figure("LearningRates.plot", path, self._draw, dpi=150)

    def _draw(self, make: Any) -> Any:
        figure = make(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.plot(self.rates, self.losses, color="0.75", label="loss")
        rates, losses = self.smoothed()
        axes.plot(rates, losses, color="C0", label="smoothed")
        if self.suggestion is not None:
            label = f"suggestion {self.suggestion:.2g}"
            axes.axvline(self.suggestion, color="C1", linestyle="--", label=label)
        axes.set_ylim(top=1.2 * losses[: losses.argmin() + 1].max())  # leaves out the divergence
        axes.legend()
        return figure

    def __str__(self) -> str:
        made = f"{len(self.rates)} steps from {self.rates[0]:.2g} to {self.rates[-1]:.2g}"
        if self.suggestion is None:
            return f"no suggestion: the loss did not decrease in {made}"
        return f"suggested learning rate {self.suggestion:.2g}, after {made}"


def find_learning_rate(
    trainer: Trainer,
    train: Dataset,
    *,
    lowest: float = 1e-6,
    highest: float = 10.0,
    steps: int = 100,
    stop_at: float = 4.0,
    **options: Any,
) -> LearningRates:
    """Train for some steps with exponentially increasing learning rates, and record the losses.

    Afterwards model, optimizer, scheme and trainer are as before, to the last bit. Callbacks are
    not called. Collective: all ranks call it, and get the same result.

    Parameters
    ----------
    trainer : Trainer
    train : Dataset
    lowest, highest : float
        Rate of the first and of the last step, instead of those of the optimizer's schedule.
    steps : int
        The training set is repeated if it is shorter.
    stop_at : float
        The search ends before if the smoothed loss exceeds this multiple of its minimum, or a loss
        is not finite.
    **options
        Arguments of `Trainer.fit`: batch_size, global_batch_size, augment, mix, targets, seed,
        loader_threads.

    Returns
    -------
    LearningRates
        With the attribute `suggestion`; ``print`` describes it and ``plot(path)`` draws it.

    Raises
    ------
    ValueError
        If a number is out of range.
    NotFiniteError
        If the loss is not finite within the first three steps.

    References
    ----------
    Smith, "Cyclical learning rates for training neural networks", WACV 2017, section 3.3.
    """
    who = "find_learning_rate"
    lowest = check_float(who, "lowest", lowest, above=0)
    highest = check_float(who, "highest", highest, above=lowest)
    steps = check_int(who, "steps", steps, at_least=3)
    search = _Search(steps, check_float(who, "stop_at", stop_at, above=1))
    rates = np.geomspace(lowest, highest, steps)
    with collective(trainer.comm, who), _unchanged(trainer):
        optimizer = trainer.optimizer
        first, optimizer.lr_factor = optimizer.iterations, 1.0
        optimizer.schedule = lambda step: float(rates[min(step - first, steps - 1)])
        trainer.callbacks = [search]
        try:
            trainer.fit(train, epochs=steps, **options)
        except _Finished:
            pass
        except NotFiniteError:
            if len(search.losses) < 3:
                raise
    return LearningRates(rates[: len(search.losses)], np.array(search.losses))


class _Finished(AgreedError):
    """Ends the search on all ranks."""


class _Search(Callback):
    """Record the loss of each step, and end training when enough is known."""

    reads_gradients = False

    def __init__(self, steps: int, stop_at: float) -> None:
        self.steps, self.stop_at = steps, stop_at
        self.losses: list[float] = []
        self._smoothed, self._weight, self._lowest = 0.0, 0.0, np.inf

    def on_step_end(self, trainer: Training) -> None:
        assert isinstance(trainer, Trainer)
        trainer.add_up_losses()  # of a captured step, which is complete only now, too
        self.losses = trainer.losses
        self._smoothed += 0.1 * (self.losses[-1] - self._smoothed)
        self._weight += 0.1 * (1 - self._weight)
        smoothed = self._smoothed / self._weight
        self._lowest = min(self._lowest, smoothed)
        if len(self.losses) == self.steps or smoothed > self.stop_at * self._lowest:
            raise _Finished("the search is complete")


@contextlib.contextmanager
def _unchanged(trainer: Trainer) -> Iterator[None]:
    """Context after which a trainer and its parts are as before. Collective: all ranks call it."""
    trainer.rebind()  # as `fit` does
    model, optimizer, exchange = trainer.model, trainer.optimizer, trainer.exchange
    seen, traffic = exchange.samples, replace(trainer.comm.traffic)
    sums_losses, exchange.sums_losses = exchange.sums_losses, True  # all ranks end at one loss
    started = exchange.buckets is model.buckets
    parts: list[Stateful] = [model, optimizer]
    parts += [exchange] if started else []
    parts += [] if trainer.loss_scale is None else [trainer.loss_scale]
    states = [copy.deepcopy(part.state()) for part in parts]
    loaded, samples, schedule = model.loaded, model.statistics.samples, optimizer.schedule
    inputs, given = model.inputs, model.given
    attributes = dict(vars(trainer))
    vars(trainer).update(  # new objects in the place of those that training changes
        epoch=0,
        step=0,
        logs={},
        history=[],
        losses=[],
        totals=trainer.setup.new_totals(),
        seconds=dict(trainer.seconds),
        _progress=[],
        _check=[],
        _results=deque(),
        _plan={},
        _loaded=False,
    )
    try:
        yield
    finally:
        exchange.in_flight.wait()
        for part, state in zip(parts, states, strict=True):
            part.load(state)
        if not started:
            exchange.free()
        model.loaded, model.statistics.samples, optimizer.schedule = loaded, samples, schedule
        exchange.samples, model.inputs, model.given = seen, inputs, given
        exchange.sums_losses = sums_losses
        vars(trainer.comm.traffic).update(vars(traffic))
        vars(trainer).clear()
        vars(trainer).update(attributes)
