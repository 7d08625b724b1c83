"""Steps of an asynchronous pipeline, which overlap, with two versions of the weights.

A step computes forward of its batch, and between these passes backward of the micro-batches of the
batch before that are still in flight; then that batch's gradients are applied. A batch uses the
weights of the beginning of its step in all its passes, on every stage: ``W(t + 1) = W(t) -
update(gradient of batch t at W(t - 1))``. When no micro-batch is in flight, as after an evaluation
or a checkpoint, ``W(t - 1)`` is ``W(t)``.

References
----------
Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from weakref import ref

from pydtnn.data import Batch
from pydtnn.model import Model
from pydtnn.model.pipeline.schedules import actions_within
from pydtnn.parallel.exchange import abandon
from pydtnn.training.metric_sums import Totals
from pydtnn.training.pipeline import StagePasses
from pydtnn.training.setup import Setup
from pydtnn.training.steps import Result, check_totals, is_finite


class TwoVersions:
    """The newest weights, which the optimizer updates, and a copy of those before.

    Parameters
    ----------
    model : Model

    Attributes
    ----------
    newest : int
        Number of the newest version.
    """

    def __init__(self, model: Model) -> None:
        self.newest = self._used = 0
        own = [p for buffer in model.buffers for p in buffer.parameters]
        empty = model.backend.empty
        self._arrays = [(p, p.value, empty(p.value.shape, p.value.dtype)) for p in own]

    def use(self, version: int) -> None:
        """Let layers read a version, the newest or the one before."""
        if version != self._used:
            self._used = version
            for parameter, newest, before in self._arrays:
                parameter.value = newest if version == self.newest else before

    def keep(self) -> None:
        """Copy the newest weights, which become those before."""
        self.use(self.newest)
        for _, newest, before in self._arrays:
            before[...] = newest
        self.newest = self._used = self.newest + 1


class AsynchronousSteps:
    """Steps of which each ends in the next one, or when its result is awaited.

    Parameters
    ----------
    setup : Setup
    """

    late, graph = 1, ""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._weights = setup, TwoVersions(setup.model)
        self._in_flight: StagePasses | None = None
        self._failed = False  # a loss is not finite
        self._result: Callable[[], Result | None] = lambda: None  # while the trainer has it

    def __call__(self, batch: Batch, epoch: int, seed: int) -> Result:
        """Compute a batch forward, and end the step before.

        Raises
        ------
        ValueError
            If its result was forgotten, so that its messages are not received.
        """
        if self._in_flight is not None and self._result() is None:
            raise ValueError(
                "Trainer: a fit has failed with micro-batches in flight; create a new trainer"
            )
        setup, model, old = self._setup, self._setup.model, self._in_flight
        assert model.pipeline is not None
        with setup.phase("forward"):
            new = StagePasses(setup, batch, epoch, seed, model.pipeline)
        new.version, self._in_flight = self._weights.newest, new
        new.sent = old.sent if old is not None else new.sent
        ranks = model.pipeline.rank, model.pipeline.ranks
        for action in actions_within(model.schedule, *ranks, len(new.shards)):
            if action.micro_batch >= 0:
                if action.kind != "forward":
                    self._update(old)
                    old = None
                self._proceed(new)
            elif old is not None:
                self._proceed(old)
        self._update(old)
        new.share_losses()
        model.statistics.samples += len(batch)
        setup.exchange.samples += len(batch)
        model.statistics.fold()
        self._weights.use(self._weights.newest)
        result = partial(self._finish, new)
        self._result = ref(result)
        return result

    def _proceed(self, passes: StagePasses) -> None:
        """Carry out the next action of a step with its weights."""
        self._weights.use(passes.version)
        passes.proceed()

    def _update(self, passes: StagePasses | None) -> None:
        """End a step, if any: apply its gradients, unless its loss or one before is not finite."""
        if passes is None:
            return
        while passes.left:
            self._proceed(passes)
        with self._setup.phase("loss"):
            passes.summed.wait()
            self._failed |= not is_finite(self._setup, self._setup.to_host(passes.totals))
        if self._failed:
            abandon(self._setup.exchange)
        else:
            self._weights.keep()
            self._setup.update()

    def _finish(self, passes: StagePasses) -> Totals:
        """Return loss and metrics of a step; if it is the last one, compute what is in flight."""
        last = self._in_flight
        if last is not None and (last is passes or self._failed):
            self._update(last)
            last.wait_for_sent()
            self._in_flight = None
        self._weights.use(passes.version if self._failed else self._weights.newest)
        try:
            return check_totals(passes)
        finally:
            self._weights.use(self._weights.newest)
            self._failed = False
