"""The steps of a trainer, and the sums of their losses and metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from pydtnn.data import Batch
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer
from pydtnn.training import checks
from pydtnn.training.capture import create_steps
from pydtnn.training.logs import Logs
from pydtnn.training.metric_sums import Totals
from pydtnn.training.setup import Setup
from pydtnn.training.steps import Eager, Result, Steps


class Stepping:
    """Base class of `Trainer`: the methods that run steps, and what they use."""

    model: Model
    optimizer: Optimizer
    setup: Setup
    binding: object
    global_batch_size: int
    losses: list[float]
    totals: Totals
    logs: Logs
    seconds: dict[str, float]
    _graph: bool
    _results: deque[Result]

    @cached_property
    def steps(self) -> Steps:
        """The implementation of steps, selected before the first."""
        return create_steps(self.setup, self._graph)

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
            self.totals += step
            self.logs = self.totals.means()

    def train_step(self, batch: Batch, epoch: int = 0, seed: int = 0) -> Totals:
        """Run one step on this rank's part of a global batch.

        Collective: all ranks call it.

        Returns
        -------
        Totals
            Loss and metrics summed over all ranks.

        Raises
        ------
        NotFiniteError
            On all ranks, if the loss is NaN or infinite; the parameters are not changed.
        """
        return self._begin(batch, epoch, seed)()

    def _clocked(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds[what] += time.perf_counter() - start
