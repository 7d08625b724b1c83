"""Computation of a rank in one training step: forward and backward of each of its shards.

A shard is a slice of the batch that is processed as a unit. By default a rank has one; with
accumulation several, with gradients summed by backward; in exact mode a number that depends on the
number of ranks, with gradients, losses and statistics summed by the fixed tree of `ExactSums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydtnn.comm import Request
from pydtnn.data import Batch
from pydtnn.data.order import Shard
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers import StepContext
from pydtnn.layers.base import Penalties
from pydtnn.layers.collectives import BATCH, Pending, Sum
from pydtnn.layers.parameters import Bucket
from pydtnn.model.execution import CollectiveCall
from pydtnn.model.graph import Node
from pydtnn.model.replay import Replays
from pydtnn.parallel.sums import sum_in_order
from pydtnn.training.axis_sums import AxisSums
from pydtnn.training.gradient_check import OnReady, check_stored
from pydtnn.training.setup import Setup
from pydtnn.utils.request import Completed

Contribution = tuple[int | None, Array]
"""Contribution of a shard to a sum over all shards; None without a shard."""


class Passes:
    """Forward and backward of a rank's shards.

    Parameters
    ----------
    setup : Setup
    batch : Batch
        Its arrays may be on the device.
    epoch : Number
    seed : int

    Attributes
    ----------
    totals : Totals
        Loss and metrics once `run` has returned: over all ranks, or of this rank alone if the
        scheme does not sum them (`GradientExchange.sums_losses`).
    """

    shared = False  # whether gradients are used up in backward: `Model.share_gradients`

    def __init__(self, setup: Setup, batch: Batch, epoch: Number, seed: int) -> None:
        self.setup, self.batch, self.begins = setup, batch, setup.optimizer.iterations == 0
        self.replays: Replays | None = None  # which runs passes instead of the model
        self.model, self.exchange = setup.model, setup.exchange
        self.sums = self.exchange.sums
        self.context = StepContext(
            training=True, seed=seed, epoch=epoch, cut_outputs=setup.objective.takes_parts(batch.y)
        )
        self.exchange.local_samples = len(batch)
        self.scale: Number = self.exchange.loss_scale(len(batch), batch.total)
        if setup.loss_scale is not None:
            self.scale = setup.loss_scale.loss(self.scale)
        self.ratios = setup.count_targets(batch)
        self.shards = batch.shards or (Shard(None, slice(0, len(batch))),)
        self.joint = setup.sync_batch_norm
        self.separate = self.sums.shards is not None and not self.joint  # statistics of each shard
        self.totals = setup.new_totals(setup.model.backend.xp)
        self.losses: list[Contribution] = []
        self.statistics: dict[int | None, Array] = {}
        self.in_flight: list[int | None] = []
        self.sums.begin(batch.total)
        self.model.statistics.begin_step()

    def run(self) -> None:
        """Compute all shards. Collective, if the scheme sums gradients or losses."""
        shards = self.shards
        groups = [shards] if self.joint else [(shard,) for shard in shards]
        summed: Request | None = None
        for group in groups:
            dys, residuals = self.forward(group)
            if group is groups[-1]:
                summed = self.add_up_losses()
            with self.setup.phase("backward"):
                last = summed is not None
                self.backward(group, dys, residuals, first=group is groups[0], last=last)
        assert summed is not None
        with self.setup.phase("loss"):
            summed.wait()
            self.fold_statistics()

    def add_up_losses(self) -> Request:
        """Start to sum losses and metrics, those of all ranks overlapped with backward."""
        with self.setup.phase("loss"):
            if not self.exchange.sums_losses:
                self.totals.values = sum_in_order([array for _, array in self.losses])
                return Completed()
            self.totals.values, summed = self.sums.add_up(self.losses)
        return summed

    def forward(self, group: Sequence[Shard]) -> tuple[list[Any], list[Any]]:
        """Compute outputs and losses; return the gradients of the losses and the saved values."""
        model, batch = self.model, self.batch
        self.report_samples(group)
        with self.setup.phase("forward"):
            xs = [batch.inputs(model.backend, shard.rows) for shard in group]
            contexts = [self.context_of(shard) for shard in group]
            self.in_flight = [shard.number for shard in group]
            outputs = (self.replays or model).forward_shards(
                xs, contexts, communicate=self.communicate, joint=self.joint
            )
            del xs
        parts = zip(group, contexts, outputs, strict=True)
        dys = [self.compute_loss(shard, context.penalties, y) for shard, context, (y, _) in parts]
        self.take_statistics(group[0])
        return dys, [saved for _, saved in outputs]

    def context_of(self, shard: Shard) -> StepContext:
        """Return the settings of the forward pass of a shard."""
        penalties = Penalties(self.scale) if self.model.penalised else None
        samples = self.batch.samples[shard.rows]
        return replace(self.context, samples=samples, penalties=penalties)

    def report_samples(self, group: Sequence[Shard]) -> None:
        """Report to the observer how many samples are computed together."""
        self.setup.report_samples(sum(shard.rows.stop - shard.rows.start for shard in group))

    def compute_loss(self, shard: Shard, penalties: Penalties | None, y: Any) -> Any:
        """Compute loss and metrics of a shard; return the gradient of the outputs.

        Without outputs, which are those of another stage, the loss is that of penalties.
        """
        with self.setup.phase("loss"):
            objective, dy = self.setup.objective, None
            totals = self.setup.new_totals(self.model.backend.xp)
            if y is not None:
                target = self.batch.targets(shard.rows)
                dy = objective.compute(y, target, self.scale, totals, ratios=self.ratios)
            if penalties is not None:
                objective.add_penalties(penalties.values, totals, self.ratios)
            self.losses.append((shard.number, totals.values))
            return dy

    def take_statistics(self, shard: Shard) -> None:
        """Keep the statistics of a shard apart if they are added in a fixed order."""
        if self.separate:
            statistics = self.model.statistics
            others = self.statistics.get(shard.number, 0)  # of its other stages
            self.statistics[shard.number] = statistics.sums + others
            statistics.begin_step()

    def fold_statistics(self) -> None:
        """Add up the statistics of all shards that were kept apart."""
        if self.separate:
            total, request = self.sums.add_up([*self.statistics.items()])
            request.wait()
            self.model.statistics.sums[:] = total

    def communicate(self, calls: Sequence[CollectiveCall]) -> Sequence[Pending]:
        """Start a collective for each shard in flight; sums over the batch are common to all."""
        node, first = calls[0]
        own = self.model.communicate
        if not isinstance(first, Sum) or BATCH not in first.axes:
            assert own is not None
            return own(calls)
        sums = [op.array for _, op in calls if isinstance(op, Sum)]
        total, request = self.sums.add_up(list(zip(self.in_flight, sums, strict=True)))
        if others := tuple(axis for axis in first.axes if axis != BATCH):
            assert own is not None
            request.wait()
            return [*own([(node, Sum(total, others))])] * len(calls)
        return [Pending(request, lambda: total)] * len(calls)

    def after_node(self, exchange: AxisSums | None) -> Callable[[Node], None] | None:
        """Return the function that is called after each node of backward.

        Parameters
        ----------
        exchange : AxisSums or None
            The sums of the last shards, while they are in progress.
        """
        return None if exchange is None else lambda node: exchange.progress()

    def backward(
        self,
        group: Sequence[Shard],
        dys: list[Any],
        residuals: list[Any],
        first: bool,
        last: bool,
        part: int | None = None,
    ) -> list[Any]:
        """Compute the gradients of shards, in a part of the graph; return those of the inputs."""
        self.report_samples(group)
        slots = self.sums.slots(len(group), self.model.buckets_of(part))
        exchange, on_ready = self.exchange_of(group, slots, last)
        if first and self.begins:
            on_ready = check_stored(self.model, on_ready, slots, part)
        dxs = (self.replays or self.model).backward_shards(
            dys,
            residuals,
            communicate=self.communicate,
            joint=self.joint,
            part=part,
            on_ready=on_ready,
            after_node=self.after_node(exchange if last else None),
            accumulate=not first,
            slots=slots,
            shared=self.shared,
        )
        exchange.finish()
        return dxs

    def exchange_of(
        self, group: Sequence[Shard], slots: Sequence[int] | None, last: bool
    ) -> tuple[AxisSums, OnReady]:
        """Return the exchange of the last shards' gradients, and what is called with buckets."""
        exchange = AxisSums(self.exchange, self.setup.mesh)

        def on_ready(bucket: Bucket, position: int) -> None:
            grads = bucket.gradients(slots[position]) if slots else bucket.grads
            final = last and position == len(group) - 1
            self.take_gradients(group[position], bucket, grads, exchange if final else None)

        return exchange, on_ready

    def take_gradients(
        self, shard: Shard, bucket: Bucket, grads: Array, exchange: AxisSums | None
    ) -> None:
        """Called when the gradients of a shard in a bucket are complete.

        Parameters
        ----------
        shard : Shard
        bucket : Bucket
        grads : Array
            Of this shard; without exact sums, those of the shards before are added.
        exchange : AxisSums or None
            What receives the bucket, if the shard is the last of the step.
        """
        self.sums.push(shard.number, bucket, grads)
        if exchange is not None:
            exchange.ready(bucket)
