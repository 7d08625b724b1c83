"""A training step of a rank's stages of a pipeline: micro-batches in the order of a schedule."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydtnn.comm import Communicator, Request
from pydtnn.data import Batch
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers.base import Penalties
from pydtnn.layers.parameters import Bucket
from pydtnn.model.graph import Node
from pydtnn.model.pipeline import Action, actions_of
from pydtnn.model.pipeline.check import source_of
from pydtnn.model.stage import Pipeline, Transfer, inputs_of
from pydtnn.parallel.sums import sum_in_order
from pydtnn.training.axis_sums import AxisSums
from pydtnn.training.gradient_check import OnReady, check_stored
from pydtnn.training.mesh import group_of_copies
from pydtnn.training.setup import Setup
from pydtnn.training.step import Passes
from pydtnn.utils.request import Completed

if TYPE_CHECKING:
    from pydtnn.model.partition.stages import Stage

RECEIVES_AHEAD = 2
"""Messages whose receives are started before the action that needs the first of them."""

Place = tuple[int, int]
"""A micro-batch and a stage."""


class StagePasses(Passes):
    """Forward and backward of a rank's micro-batches in its stages.

    The micro-batches are the shards of the batch. Receives are started before the preceding actions
    are computed, and sends are awaited at the end of the step. Steps that overlap are computed
    action by action (`pydtnn.training.asynchronous`).

    Parameters
    ----------
    setup, batch, epoch, seed
        See `Passes`.
    pipeline : Pipeline

    Attributes
    ----------
    most_kept : float
        The most micro-batches whose values were kept for backward at a time, see `max_in_flight`.
    left : deque of Action
        Actions that have not been carried out.
    sent : deque of Transfer
        Messages that may be incomplete.
    summed : Request
        Of the sums of losses and metrics.
    version : int
        Of the weights, if steps overlap.
    """

    def __init__(
        self, setup: Setup, batch: Batch, epoch: Number, seed: int, pipeline: Pipeline
    ) -> None:
        super().__init__(setup, batch, epoch, seed)
        self.pipeline = pipeline
        self.most_kept, self.version = 0.0, 0
        ranks = pipeline.rank, pipeline.ranks
        self._actions = actions_of(setup.model.schedule, *ranks, len(self.shards))
        self._parts = {stage.number: part for part, stage in enumerate(pipeline.stages)}
        self._copies = group_of_copies(self.model, setup.mesh)
        self.left = deque(self._actions)
        self._left = Counter(action.stage for action in self._actions)
        self._unsummed = deque(self._order_of_sums())
        self._sums: list[tuple[Bucket, Request]] = []  # over the copies of a stage
        self._firsts = {(a.kind, a.stage): a for a in reversed(self._actions)}
        self._lasts = {(a.kind, a.stage): a for a in self._actions} if self._copies is None else {}
        self._first = self._last = False  # of the actions of their kind and stage
        stages = pipeline.owners.stages
        self._awaited = (a for a in self._actions if source_of(a, stages) is not None)
        self._received: dict[Action, Transfer] = {}
        self.sent: deque[Transfer] = deque()
        self._kept: dict[Place, tuple[Any, Any]] = {}  # gradient of the loss, and saved values
        self._checks: dict[int, OnReady] = {}
        self.summed: Request = Completed()
        self._penalties: Penalties | None = None  # of the forward pass before
        self._totals: list[list[Array]] = [[] for _ in self.shards]  # of each stage of this rank
        self._losses_left = sum(
            a.kind == "forward" and (self.model.penalised or pipeline.is_last(self._stage_of(a)[1]))
            for a in self._actions
        )
        self._receive_ahead(RECEIVES_AHEAD)
        self._start_sums()

    def run(self) -> None:
        """Compute all micro-batches. Collective: all ranks call it."""
        while self.left:
            self.proceed()
        if self._copies is not None:
            with self.setup.phase("exchange"):
                self._finish_sums(self._copies)
        with self.setup.phase("loss"):
            self.summed.wait()
            if self.model.penalised or self._copies is not None:
                self.pipeline.add(self.totals.values)
            else:
                self.pipeline.broadcast(self.totals.values)
            self.fold_statistics()
        with self.setup.phase("exchange"):
            self.wait_for_sent()

    def proceed(self) -> None:
        """Carry out the next action."""
        compute = {
            "forward": self._forward_of,
            "backward": self._backward_of,
            "backward_inputs": self._backward_inputs_of,
            "backward_parameters": self._backward_parameters_of,
        }
        action = self.left.popleft()
        number, kind = action.micro_batch, (action.kind, action.stage)
        with self.setup.phase("exchange", number):
            arrays = self._receive(action)
        with self.setup.phase(action.kind.partition("_")[0], number):
            self._first, self._last = action == self._firsts[kind], action == self._lasts.get(kind)
            compute[action.kind](action, arrays)
        if action.kind == "forward":
            self._end_forward(action)
        self._left[action.stage] -= 1
        self._start_sums()

    def share_losses(self) -> None:
        """Start to send loss and metrics to all stages. Collective: all ranks call it."""
        self.summed.wait()
        self.summed = self.pipeline.start_sum(self.totals.values)

    def wait_for_sent(self) -> None:
        """Wait until other ranks have received all messages."""
        for sent in self.sent:
            sent.wait()

    def _order_of_sums(self) -> list[int]:
        """Return the stages that other ranks have, too, as the first of these completes them."""
        if self._copies is None:
            return []
        first, ranks = self.pipeline.copies[0], self.pipeline.ranks
        actions = actions_of(self.setup.model.schedule, first, ranks, len(self.shards))
        ends = dict.fromkeys(action.stage for action in reversed(actions))
        return [*(stage for stage in self._parts if stage not in ends), *reversed(ends)]

    def _start_sums(self) -> None:
        """Start to add up the gradients of complete stages, in the same order on all copies."""
        while self._unsummed and not self._left[self._unsummed[0]]:
            assert self._copies is not None
            stage = self._unsummed.popleft()
            for bucket in self.model.buckets_of(self._parts[stage]):
                if stage not in self._left:
                    bucket.grads[...] = 0
                self._sums.append((bucket, self._copies.iallreduce(bucket.grads)))

    def _finish_sums(self, copies: Communicator) -> None:
        """Wait for the sums over the copies of stages, and pass them on; add up statistics."""
        exchange = AxisSums(self.exchange, self.setup.mesh)
        for bucket, request in self._sums:
            request.wait()
            exchange.ready(bucket)
        exchange.finish()
        if len(self.model.statistics.sums):
            copies.allreduce(self.model.statistics.sums)

    def _stage_of(self, action: Action) -> tuple[int, Stage]:
        """Return the part of the graph and the stage of an action."""
        part = self._parts[action.stage]
        return part, self.pipeline.stages[part]

    def _forward_of(self, action: Action, received: tuple[Array, ...]) -> None:
        model, (part, stage) = self.model, self._stage_of(action)
        shard = self.shards[action.micro_batch]
        self.report_samples([shard])
        inputs = inputs_of(stage, self.batch.inputs(model.backend, shard.rows), received)
        context = self.context_of(shard)
        self._penalties = context.penalties
        self.in_flight = [shard.number]
        ((y, saved),) = model.forward_shards(
            [inputs],
            [context],
            communicate=self.communicate,
            part=part,
            progress=self._progress,
        )
        self._send(action, y)
        self._kept[place_of(action)] = y if self.pipeline.is_last(stage) else None, saved

    def _end_forward(self, action: Action) -> None:
        """Compute the loss in the last stage, and add those of layers in all stages."""
        number = action.micro_batch
        shard, (y, saved) = self.shards[number], self._kept[place_of(action)]
        if y is not None or self.model.penalised:
            dy = self.compute_loss(shard, self._penalties, y)
            self._kept[place_of(action)] = dy, saved
            _, values = self.losses.pop()
            self._totals[number].append(values)
            self._losses_left -= 1
            if not self._losses_left:  # overlapped with backward
                totals = zip(self.shards, self._totals, strict=True)
                self.losses = [(shard.number, sum_in_order(own)) for shard, own in totals if own]
                self.summed = self.add_up_losses()
        self.most_kept = max(self.most_kept, len(self._kept) / len(self._parts))
        self.take_statistics(shard)

    def _backward_of(self, action: Action, received: tuple[Array, ...]) -> None:
        dys, residuals = self._begin_backward(action, received)
        del received
        (dx,) = self.backward(
            [self.shards[action.micro_batch]],
            dys,
            residuals,
            first=self._first,
            last=self._last,
            part=self._parts[action.stage],
        )
        self._send(action, dx)

    def _backward_inputs_of(self, action: Action, received: tuple[Array, ...]) -> None:
        dys, residuals = self._begin_backward(action, received)
        del received
        part = self._parts[action.stage]
        self.report_samples([self.shards[action.micro_batch]])
        if self._first and self.setup.optimizer.iterations == 0:
            self._checks[part] = check_stored(self.model, part=part)
        (dx,) = self.model.backward_shards(
            dys,
            residuals,
            communicate=self.communicate,
            part=part,
            after_node=self.after_node(None),
            accumulate=not self._first,
            inputs_only=True,
        )
        self._send(action, dx)
        self._kept[place_of(action)] = None, residuals[0]

    def _backward_parameters_of(self, action: Action, received: tuple[Array, ...]) -> None:
        part, group = self._parts[action.stage], [self.shards[action.micro_batch]]
        self.report_samples(group)
        exchange, exchanged = self.exchange_of(group, None, self._last)
        check = self._checks.get(part) if self._first else None

        def on_ready(bucket: Bucket, position: int) -> None:
            if check is not None:
                check(bucket, position)
            exchanged(bucket, position)

        self.model.backward_parameters(
            self._kept.pop(place_of(action))[1],
            part=part,
            on_ready=on_ready,
            after_node=self.after_node(exchange if self._last else None),
            accumulate=not self._first,
        )
        exchange.finish()

    def _begin_backward(
        self, action: Action, received: tuple[Array, ...]
    ) -> tuple[list[Any], list[list[Any]]]:
        """Return the gradients of a micro-batch's outputs and its saved values; keep neither."""
        dy, saved = self._kept.pop(place_of(action))
        self.in_flight = [self.shards[action.micro_batch].number]
        return [received if dy is None else dy], [saved]

    def after_node(self, exchange: AxisSums | None) -> Callable[[Node], None]:
        """Return the function that is called after each node of backward."""

        def progress(node: Node) -> None:
            self._progress()
            if exchange is not None:
                exchange.progress()

        return progress

    def _progress(self) -> None:
        """Let the communicator make progress with the oldest messages; forget complete ones."""
        while self.sent and self.sent[0].test():
            self.sent.popleft()
        for _, request in self._sums:
            if not request.test():
                break

    # -- messages ---------------------------------------------------------------------------------

    def _receive_ahead(self, messages: int) -> None:
        """Start the receives of the next messages."""
        for action in islice(self._awaited, messages):
            rows, (_, stage) = self.shards[action.micro_batch].rows, self._stage_of(action)
            self._received[action] = self.pipeline.receive(
                stage, action.direction, rows.stop - rows.start, action.micro_batch
            )

    def _receive(self, action: Action) -> tuple[Array, ...]:
        """Wait for the message of an action, if any, and start to receive another one."""
        message = self._received.pop(action, None)
        if message is None:
            return ()
        arrays = message.wait()
        self._receive_ahead(1)
        return arrays

    def _send(self, action: Action, result: Any) -> None:
        """Start to send the result of an action to the stage that waits for it."""
        _, stage = self._stage_of(action)
        self.sent.append(self.pipeline.send(stage, action.direction, result, action.micro_batch))


def place_of(action: Action) -> Place:
    """Return the micro-batch and the stage of an action."""
    return action.micro_batch, action.stage
