"""Training steps, to which `Trainer` passes each batch.

Some devices run a step asynchronously (`pydtnn.training.capture`). A step therefore returns a
function that waits for its losses, and the trainer may begin the next step before it calls this
function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from pydtnn.data import Batch
from pydtnn.model.presence import Presence
from pydtnn.model.replay import Replays
from pydtnn.training.metric_sums import Totals
from pydtnn.training.nonfinite import not_finite_at
from pydtnn.training.pipeline import create_passes
from pydtnn.training.setup import Setup

Result = Callable[[], Totals]
"""Waits for a step and returns its loss and metrics on the host, over all ranks or of this rank
(`GradientExchange.sums_losses`); raises NotFiniteError on all ranks, or LocalNotFiniteError on this
one, if these are NaN or infinite."""


class Steps(Protocol):
    """Runs training steps. Collective: all ranks call it with their parts of the same batches."""

    late: int
    """Steps that may be incomplete when another begins."""

    @property
    def graph(self) -> str:
        """Whether steps are replays of a CUDA graph, or why not; empty without graphs."""

    def __call__(self, batch: Batch, epoch: int, seed: int) -> Result:
        """Begin a step."""


class Eager:
    """Steps with kernels launched one by one from Python.

    Parameters
    ----------
    setup : Setup
    graph : str
        The reason why nothing is captured.

    Attributes
    ----------
    replays : Replays
        The passes that are repeated without the model's loops, or the reason why not.
    """

    late = 0

    def __init__(self, setup: Setup, graph: str = "") -> None:
        self._setup, self.graph = setup, graph
        self.replays = Replays(setup.model)
        exchange, network = setup.exchange, setup.model.graph
        self._presence: Presence | None = None
        if exchange.gathers:
            parts = network.nodes, network.trained, setup.model.buckets
            self._presence = Presence(*parts, exchange.before_layer)

    def __call__(self, batch: Batch, epoch: int, seed: int) -> Result:
        """Run a whole step; the parameters are not changed if the loss is not finite."""
        setup = self._setup
        exchange, statistics = setup.exchange, setup.model.statistics
        with setup.phase("forward"):
            passes = create_passes(setup, batch, epoch, seed, self.replays)
        setup.model.graph.presence = self._presence
        try:
            passes.run()
        finally:
            setup.model.graph.presence = None
            self.replays.end_step()
        with setup.phase("loss"):
            totals = setup.to_host(passes.totals)
            if setup.model.backend.has_values and not np.isfinite(totals.values).all():
                if not setup.own_losses:
                    exchange.abandon()
                raise not_finite_at(setup, batch, epoch, seed, totals)
        statistics.samples += len(batch)
        exchange.samples += len(batch)
        setup.update()
        with setup.phase("update"):  # after the last message: if a rank fails, nothing has changed
            statistics.fold()
        return lambda: totals
