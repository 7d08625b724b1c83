"""Computation of a rank in one training step: forward and backward of each of its shards.

A shard is a slice of the batch that is processed as a unit. By default a rank has one; with
accumulation several, with gradients summed by backward; in exact mode a number that depends on the
number of ranks, with gradients, losses and statistics summed by the fixed tree of `ExactSums`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydtnn.comm import Request
from pydtnn.data import Batch
from pydtnn.data.order import Shard
from pydtnn.kernels.reference.family import Array, Number
from pydtnn.layers import StepContext
from pydtnn.layers.collectives import BATCH, Pending, Sum
from pydtnn.layers.parameters import Bucket
from pydtnn.model.execution import Asked
from pydtnn.training.axis_sums import AxisSums
from pydtnn.training.gradient_check import check_stored
from pydtnn.training.setup import Setup

Part = tuple[int | None, Array]
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
        Loss and metrics over all ranks, once `run` has returned.
    """

    def __init__(self, setup: Setup, batch: Batch, epoch: Number, seed: int) -> None:
        self.setup, self.batch = setup, batch
        self.model, self.exchange = setup.model, setup.exchange
        self.sums = self.exchange.sums
        self.context = StepContext(training=True, seed=seed, epoch=epoch)
        self.exchange.local_samples = len(batch)
        self.scale: Number = self.exchange.loss_scale(len(batch), batch.total)
        if setup.loss_scale is not None:
            self.scale = setup.loss_scale.loss(self.scale)
        self.joint = setup.sync_batch_norm
        self.separate = self.sums.shards is not None and not self.joint  # statistics of each shard
        self.totals = setup.new_totals(setup.model.backend.xp)
        self.losses: list[Part] = []
        self.statistics: list[Part] = []
        self.in_flight: list[int | None] = []

    def run(self) -> None:
        """Compute all shards. Collective: all ranks call it."""
        self.sums.begin(self.batch.total)
        statistics = self.model.statistics
        statistics.begin_step()
        shards = self.batch.shards or (Shard(None, slice(0, len(self.batch))),)
        groups = [shards] if self.joint else [(shard,) for shard in shards]
        summed: Request | None = None
        for group in groups:
            dys, residuals = self._forward(group)
            if group is groups[-1]:  # overlapped with backward
                self.totals.values, summed = self.sums.add_up(self.losses)
            self._backward(group, dys, residuals, first=group is groups[0], last=summed is not None)
        assert summed is not None
        summed.wait()
        if self.separate:
            total, request = self.sums.add_up(self.statistics)
            request.wait()
            statistics.sums[:] = total

    def _forward(self, group: Sequence[Shard]) -> tuple[list[Any], list[Any]]:
        """Compute outputs and losses; return the gradients of the losses and the saved values."""
        model, batch = self.model, self.batch
        xs = [batch.inputs(model.backend, shard.rows) for shard in group]
        contexts = [replace(self.context, samples=batch.samples[s.rows]) for s in group]
        self.in_flight = [shard.number for shard in group]
        outputs = model.forward_shards(
            xs, contexts, communicate=self._communicate, joint=self.joint
        )
        del xs
        dys, residuals = [], []
        for shard, (y, saved) in zip(group, outputs, strict=True):
            totals = self.setup.new_totals(model.backend.xp)
            target = batch.targets(shard.rows)
            dys.append(self.setup.objective.compute(y, target, self.scale, totals))
            residuals.append(saved)
            self.losses.append((shard.number, totals.values))
        if self.separate:
            self.statistics.append((group[0].number, model.statistics.sums.copy()))
            model.statistics.begin_step()
        return dys, residuals

    def _communicate(self, asked: Sequence[Asked]) -> Sequence[Pending]:
        """Start a collective for each shard in flight; sums over the batch are common to all."""
        node, first = asked[0]
        own = self.model.communicate
        if not isinstance(first, Sum) or BATCH not in first.axes:
            assert own is not None
            return own(asked)
        sums = [op.array for _, op in asked if isinstance(op, Sum)]
        total, request = self.sums.add_up(list(zip(self.in_flight, sums, strict=True)))
        others = tuple(axis for axis in first.axes if axis != BATCH)
        if others:
            assert own is not None
            request.wait()
            return [*own([(node, Sum(total, others))])] * len(asked)
        return [Pending(request, lambda: total)] * len(asked)

    def _backward(
        self,
        group: Sequence[Shard],
        dys: list[Any],
        residuals: list[Any],
        first: bool,
        last: bool,
    ) -> None:
        slots = self.sums.slots(len(group))
        exchange = AxisSums(self.exchange, self.setup.mesh)

        def on_ready(bucket: Bucket, position: int) -> None:
            grads = bucket.gradients(slots[position]) if slots else bucket.grads
            self.sums.push(group[position].number, bucket, grads)
            if last and position == len(group) - 1:
                exchange.ready(bucket)

        begins = first and self.setup.optimizer.iterations == 0
        self.model.backward_shards(
            dys,
            residuals,
            communicate=self._communicate,
            joint=self.joint,
            on_ready=check_stored(self.model, on_ready, slots) if begins else on_ready,
            after_node=(lambda node: exchange.progress()) if last else None,
            accumulate=not first,
            slots=slots,
        )
        exchange.finish()
