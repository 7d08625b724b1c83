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
from pydtnn.data.order import Shard
from pydtnn.layers.parameters import Bucket
from pydtnn.model.passes import Hook
from pydtnn.model.presence import Presence
from pydtnn.model.replay import Replays
from pydtnn.parallel.exchange import GathersParameters, abandon
from pydtnn.training.metric_sums import Totals
from pydtnn.training.nonfinite import not_finite_at
from pydtnn.training.setup import Setup
from pydtnn.training.step import Passes
from pydtnn.utils.request import Completed, Request

Result = Callable[[], Totals]
"""Waits for a step and returns its loss and metrics on the host, over all ranks or of this rank
(`GradientExchange.sums_losses`); raises NotFiniteError on all ranks, or LocalNotFiniteError on this
one, if these are NaN or infinite."""


class TrainingSteps(Protocol):
    """Runs training steps. Collective: all ranks call it with their parts of the same batches."""

    late: int
    """Steps that may be incomplete when another begins."""

    @property
    def graph(self) -> str:
        """Whether steps are replays of a CUDA graph, or why not; empty without graphs."""

    def __call__(self, batch: Batch, epoch: int, seed: int) -> Result:
        """Begin a step."""


class UpdatingPasses(Passes):
    """Passes of a rank alone that update each bucket when its gradients are complete.

    These are not kept. The parameters are not changed if the loss is not finite.
    """

    shared = True

    def add_up_losses(self) -> Request:
        """Add up losses and metrics, and begin the update."""
        super().add_up_losses().wait()
        check_totals(self)
        self.setup.optimizer.begin_step()
        return Completed()

    def take_gradients(self, shard: Shard, bucket: Bucket, *others: object) -> None:
        """Update the bucket."""
        bucket.clear_padding()
        with self.setup.phase("update", bucket.index):
            self.setup.optimizer.step_bucket(bucket)


def check_totals(passes: Passes) -> Totals:
    """Return loss and metrics of a step on the host.

    Raises
    ------
    NotFiniteError, LocalNotFiniteError
        If one is not finite.
    """
    setup = passes.setup
    totals = setup.to_host(passes.totals)
    if not is_finite(setup, totals):
        if not setup.own_losses:
            abandon(setup.exchange)
        raise not_finite_at(setup, passes.batch, passes.context.epoch, passes.context.seed, totals)
    return totals


def is_finite(setup: Setup, totals: Totals) -> bool:
    """Return whether loss and metrics are finite, if kernels compute values."""
    return not setup.model.backend.has_values or bool(np.isfinite(totals.values).all())


class Eager:
    """Steps with kernels launched one by one from Python.

    Parameters
    ----------
    setup : Setup
    graph : str
        The reason why nothing is captured.
    uses_up : callable, optional
        Returns whether gradients are not kept after a step, but used up in backward.

    Attributes
    ----------
    replays : Replays
        The passes that are repeated without the model's loops, or the reason why not.
    """

    late = 0

    def __init__(
        self, setup: Setup, graph: str = "", uses_up: Callable[[], bool] = lambda: False
    ) -> None:
        self._setup, self.graph, self._uses_up = setup, graph, uses_up
        self.replays = Replays(setup.model)
        exchange, network = setup.exchange, setup.model.graph
        self._hooks: list[Hook] = []
        if isinstance(exchange, GathersParameters):
            parts = network.nodes, network.trained, setup.model.buckets
            self._hooks.append(Presence(*parts, exchange.before_layer))

    def __call__(self, batch: Batch, epoch: int, seed: int) -> Result:
        """Run a whole step; the parameters are not changed if the loss is not finite."""
        setup = self._setup
        exchange, statistics = setup.exchange, setup.model.statistics
        early = self._uses_up() and len(batch.shards) < 2
        if early:
            setup.model.share_gradients()
        with setup.phase("forward"):
            passes = self._passes(UpdatingPasses if early else Passes, batch, epoch, seed)
        setup.model.graph.hooks += self._hooks
        try:
            passes.run()
        finally:
            for hook in self._hooks:
                setup.model.graph.hooks.remove(hook)
            self.replays.end_step()
            if early:
                setup.model.discard_gradients()
        with setup.phase("loss"):
            totals = check_totals(passes)
        statistics.samples += len(batch)
        exchange.samples += len(batch)
        if not early:
            setup.update()
        with setup.phase("update"):  # after the last message: if a rank fails, nothing has changed
            statistics.fold()
        return lambda: totals

    def _passes(self, kind: type[Passes], batch: Batch, epoch: int, seed: int) -> Passes:
        """Create the computation of a rank in one step, of a kind if it has no pipeline."""
        setup, pipeline = self._setup, self._setup.model.pipeline
        if pipeline is not None:
            from pydtnn.training.pipeline import StagePasses  # only with stages

            return StagePasses(setup, batch, epoch, seed, pipeline)
        passes = kind(setup, batch, epoch, seed)
        if setup.exchange.sums.shards is None:  # otherwise several sets of gradients
            passes.replays = self.replays
        return passes
