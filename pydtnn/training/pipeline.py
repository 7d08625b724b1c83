"""A training step of one stage of a pipeline: its micro-batches in the order of a schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from pydtnn.comm import Request
from pydtnn.data import Batch
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers.parameters import Bucket
from pydtnn.model.graph import Node
from pydtnn.model.stage import Stage, Transfer
from pydtnn.parallel.pipeline import Action, actions_of
from pydtnn.parallel.pipeline.check import source_of
from pydtnn.training.axis_sums import AxisSums
from pydtnn.training.gradient_check import OnReady, check_stored
from pydtnn.training.setup import Setup
from pydtnn.training.step import Passes

RECEIVES_AHEAD = 2
"""Messages whose receives are started before the action that needs the first of them."""


class StagePasses(Passes):
    """Forward and backward of a rank's micro-batches in its stage.

    The micro-batches are the shards of the batch. Receives are started before the preceding actions
    are computed, and sends are awaited at the end of the step.

    Parameters
    ----------
    setup, batch, epoch, seed
        See `Passes`.
    stage : Stage

    Attributes
    ----------
    most_kept : int
        The most micro-batches whose values were kept for backward at a time.
    """

    def __init__(self, setup: Setup, batch: Batch, epoch: Number, seed: int, stage: Stage) -> None:
        super().__init__(setup, batch, epoch, seed)
        self.stage = stage
        self.most_kept = 0
        self._actions = actions_of(setup.schedule, stage.number, stage.count, len(self.shards))
        self._awaited = self._messages()
        self._received: dict[Action, Transfer] = {}
        self._sent: deque[Transfer] = deque()
        self._kept: dict[int, tuple[Any, Any]] = {}  # gradient of the loss, and saved values
        self._check: OnReady | None = None
        self._summed: Request | None = None

    def run(self) -> None:
        """Compute all micro-batches. Collective: all stages call it."""
        compute = {
            "backward": self._backward_of,
            "backward_inputs": self._backward_inputs_of,
            "backward_parameters": self._backward_parameters_of,
        }
        ends = {kind: self._first_and_last(kind) for kind in compute}
        self._receive_ahead(RECEIVES_AHEAD)
        for action in self._actions:
            number = action.micro_batch
            with self.setup.phase("exchange", number):
                arrays = self._receive(action)
            if action.kind == "forward":
                self._forward_of(number, arrays)
            else:
                first, last = (number == end for end in ends[action.kind])
                with self.setup.phase("backward", number):
                    compute[action.kind](number, arrays, first=first, last=last)
        with self.setup.phase("loss"):
            if self._summed is not None:
                self._summed.wait()
            self.stage.broadcast(self.totals.values)
            self.fold_statistics()
        with self.setup.phase("exchange"):
            for sent in self._sent:
                sent.wait()

    def _first_and_last(self, kind: str) -> tuple[int, int]:
        """Return the micro-batches of the first and the last action of a kind, -1 without any."""
        numbers = [a.micro_batch for a in self._actions if a.kind == kind] or [-1]
        return numbers[0], numbers[-1]

    def _forward_of(self, number: int, received: tuple[Array, ...]) -> None:
        model, shard = self.model, self.shards[number]
        self.report_samples([shard])
        with self.setup.phase("forward", number):
            inputs = self.stage.inputs(self.batch.inputs(model.backend, shard.rows), received)
            context = replace(self.context, samples=self.batch.samples[shard.rows])
            self.in_flight = [shard.number]
            ((y, saved),) = model.forward_shards(
                [inputs],
                [context],
                communicate=self.communicate,
                progress=self._progress,
            )
            del inputs, received
            if not self.stage.last:
                self._sent.append(self.stage.send_values(y, number))
        self._kept[number] = self.compute_loss(shard, y) if self.stage.last else None, saved
        self.most_kept = max(self.most_kept, len(self._kept))
        self.take_statistics(shard)
        if self.stage.last and len(self.losses) == len(self.shards):  # overlapped with backward
            self._summed = self.add_up_losses()

    def _backward_of(
        self, number: int, received: tuple[Array, ...], *, first: bool, last: bool
    ) -> None:
        dys, residuals = self._begin_backward(number, received)
        del received
        (dx,) = self.backward([self.shards[number]], dys, residuals, first=first, last=last)
        self._sent.append(self.stage.send_gradients(dx, number))

    def _backward_inputs_of(
        self, number: int, received: tuple[Array, ...], *, first: bool, last: bool
    ) -> None:
        dys, residuals = self._begin_backward(number, received)
        del received
        self.report_samples([self.shards[number]])
        if first and self.setup.optimizer.iterations == 0:
            self._check = check_stored(self.model)
        (dx,) = self.model.backward_shards(
            dys,
            residuals,
            communicate=self.communicate,
            after_node=self.after_node(None),
            accumulate=not first,
            inputs_only=True,
        )
        self._sent.append(self.stage.send_gradients(dx, number))
        self._kept[number] = None, residuals[0]

    def _backward_parameters_of(
        self, number: int, received: tuple[Array, ...], *, first: bool, last: bool
    ) -> None:
        group = [self.shards[number]]
        self.report_samples(group)
        exchange, exchanged = self.exchange_of(group, None, last)
        check = self._check if first else None

        def on_ready(bucket: Bucket, position: int) -> None:
            if check is not None:
                check(bucket, position)
            exchanged(bucket, position)

        self.model.backward_parameters(
            self._kept.pop(number)[1],
            on_ready=on_ready,
            after_node=self.after_node(exchange if last else None),
            accumulate=not first,
        )
        exchange.finish()

    def _begin_backward(
        self, number: int, received: tuple[Array, ...]
    ) -> tuple[list[Any], list[list[Any]]]:
        """Return the gradients of a micro-batch's outputs and its saved values; keep neither."""
        dy, saved = self._kept.pop(number)
        self.in_flight = [self.shards[number].number]
        return [dy if self.stage.last else received], [saved]

    def after_node(self, exchange: AxisSums | None) -> Callable[[Node], None]:
        """Return the function that is called after each node of backward."""

        def progress(node: Node) -> None:
            self._progress()
            if exchange is not None:
                exchange.progress()

        return progress

    def _progress(self) -> None:
        """Let the communicator make progress with the oldest messages; forget complete ones."""
        while self._sent and self._sent[0].test():
            self._sent.popleft()

    # -- messages ---------------------------------------------------------------------------------

    def _messages(self) -> Iterator[Action]:
        """Yield the actions of this stage that wait for a message."""
        for action in self._actions:
            if source_of(self.stage.number, self.stage.count, action) is not None:
                yield action

    def _receive_ahead(self, messages: int) -> None:
        """Start the receives of the next messages."""
        for action in islice(self._awaited, messages):
            rows = self.shards[action.micro_batch].rows
            samples = rows.stop - rows.start
            start = (
                self.stage.receive_values
                if action.kind == "forward"
                else self.stage.receive_gradients
            )
            self._received[action] = start(samples, action.micro_batch)

    def _receive(self, action: Action) -> tuple[Array, ...]:
        """Wait for the message of an action, if any, and start to receive another one."""
        message = self._received.pop(action, None)
        if message is None:
            return ()
        arrays = message.wait()
        self._receive_ahead(1)
        return arrays


def create_passes(setup: Setup, batch: Batch, epoch: Number, seed: int) -> Passes:
    """Create the computation of a rank in one step."""
    if setup.model.stage is not None:
        return StagePasses(setup, batch, epoch, seed, setup.model.stage)
    return Passes(setup, batch, epoch, seed)
