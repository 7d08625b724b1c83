"""The steps of a trainer, and the sums of their losses and metrics."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pydtnn.comm.metered import Metered
from pydtnn.data import Batch, Loader
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.training import checks
from pydtnn.training.callback import Callback
from pydtnn.training.equality import with_check
from pydtnn.training.logs import Logs
from pydtnn.training.metric_sums import Totals
from pydtnn.training.progress import with_progress
from pydtnn.training.setup import Setup
from pydtnn.training.steps import Eager, Result, Steps
from pydtnn.utils import clock
from pydtnn.utils.errors import Interrupted


class Stepping:
    """Base class of `Trainer`: the methods that run steps, and what they use."""

    model: Model
    optimizer: Optimizer
    setup: Setup
    comm: Metered
    exchange: GradientExchange
    callbacks: Sequence[Callback]
    binding: object
    global_batch_size: int
    losses: list[float]
    totals: Totals
    logs: Logs
    seconds: dict[str, float]
    epoch: int
    step: int
    samples_seen: int
    _progress: list[Callback]
    _check: list[Callback]
    _graph: bool
    _results: deque[Result]
    _own: list[Totals]
    _own_sum: Totals

    @cached_property
    def steps(self) -> Steps:
        """The implementation of steps, selected before the first."""
        if self.setup.model.backend.name != "cuda":
            return Eager(self.setup)
        from pydtnn.training.capture import create_steps  # only here: it imports GPU code

        return create_steps(self.setup, self._graph)

    def _run_steps(self, loader: Loader, seed: int) -> None:
        """Run the remaining steps of an epoch."""
        setup, observer = self.setup, self.setup.observer
        batches = loader.epoch(self.epoch, start=self.step)
        while self.step < len(loader):
            self._end_if_signalled()
            if observer is not None:
                observer.step(self.epoch, self.step)
            with setup.phase("data"):
                batch = self._clocked("data", next, batches)
            before = self.comm.traffic.seconds
            with setup.phase("step"):
                self._results.append(self._clocked("steps", self._begin, batch, self.epoch, seed))
                self.samples_seen += batch.total
                self.step += 1
                with setup.phase("loss"):
                    self.drain(self.steps.late)
                    alone = not self.exchange.sums_losses
                    if alone and (self.exchange.met or self.step == len(loader)):
                        self.add_up_losses()
            self.seconds["communication"] += self.comm.traffic.seconds - before
            self._notify("on_step_end")
        self._end_if_signalled()  # before the evaluation
        self.drain()

    def _end_if_signalled(self) -> None:
        """End training if a signal has asked for it and all ranks have completed their last step.

        Raises
        ------
        Interrupted
            On all ranks.
        """
        supervision = self.comm.supervision
        last = None if supervision is None else supervision.last_step.passed()
        if last is not None:
            self.add_up_losses()
            self._notify("on_interrupt")
            name = signal.Signals(last.signal).name
            raise Interrupted(
                f"rank {last.rank} received {name}: training has ended after step {self.step} of "
                f"epoch {self.epoch + 1}",
                last.signal,
            )

    def _notify(self, event: str, *args: Any) -> None:
        """Call a method of every callback."""
        for callback in self._all_callbacks():
            with self.setup.phase(f"callback {type(callback).__name__}"):
                getattr(callback, event)(self, *args)

    @np.errstate(all="ignore")  # overflow is reported by `not_finite`
    def _begin(self, batch: Batch, epoch: int, seed: int) -> Result:
        checks.check_binding(self.optimizer, self.binding, self.model)
        steps = self.steps
        if batch.total < self.global_batch_size:  # the last of an epoch
            self.drain()  # in order
            steps = Eager(self.setup)
        return steps(batch, epoch, seed)

    def drain(self, late: int = 0) -> None:
        """Wait until at most `late` steps are incomplete, and add the losses of the others."""
        while len(self._results) > late:
            step = self._clocked("steps", self._results.popleft())
            self.losses.append(step.means()["loss"])
            if self.exchange.sums_losses:
                self.totals += step
            else:
                self._own.append(step)
                self._own_sum += step
            self.logs = (self.totals + self._own_sum).means()

    @property
    def own_steps(self) -> int:
        """The last steps of which `losses` and `logs` have those of this rank's samples only."""
        return len(self._own)

    def add_up_losses(self) -> None:
        """Complete all steps, and sum the losses of `own_steps` over all ranks.

        Collective, unless the scheme sums them in every step: all ranks call it after the same one.
        """
        self.drain()
        steps = self._own
        self._forget_own()
        if not steps:
            return
        values = np.concatenate([step.values for step in steps])
        self._clocked("steps", self.setup.data.allreduce, values)
        for step, summed in zip(steps, np.split(values, len(steps)), strict=True):
            step.values[:] = summed
            self.totals += step
        self.losses[-len(steps) :] = [step.means()["loss"] for step in steps]
        self.logs = self.totals.means()

    def _forget_own(self) -> None:
        self._own, self._own_sum = [], self.setup.new_totals()

    def train_step(self, batch: Batch, epoch: int = 0, seed: int = 0) -> Totals:
        """Run one step on this rank's part of a global batch.

        Collective: all ranks call it.

        Returns
        -------
        Totals
            Loss and metrics, summed over all ranks if the scheme sums them in every step
            (`GradientExchange.sums_losses`); otherwise those of this rank.

        Raises
        ------
        NotFiniteError
            On all ranks, if the loss is NaN or infinite; the parameters are not changed.
        LocalNotFiniteError
            The same on one rank, if the scheme does not sum losses.
        """
        with self.setup.observed(), self.setup.phase("step"):
            return self._begin(batch, epoch, seed)()

    def rebind(self) -> bool:
        """Bind the optimizer with its state to other trainable parameters; return whether needed.

        Collective: all ranks call it. Called by `fit`, which then starts the exchange anew, and by
        `load_checkpoint`.
        """
        if self.optimizer.is_bound_to(self.model.buffers):
            return False
        self.exchange.drain()
        self.optimizer.rebind(self.model.buffers, self.exchange)
        self.binding = self.optimizer.binding
        vars(self).pop("steps", None)  # a captured graph contains the addresses of the arrays
        return True

    def _clocked(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        start = clock.now()
        try:
            return call(*args)
        finally:
            self.seconds[what] += clock.now() - start

    def _all_callbacks(self) -> list[Callback]:
        return with_check(self._check, with_progress(self._progress, self.callbacks))
