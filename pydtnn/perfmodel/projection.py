"""Projections: time, memory and limits of strategies, from outlines that are computed once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import Any

from pydtnn.kernels import Backend, create_backend
from pydtnn.layers.collectives import PIPELINE
from pydtnn.model.memory import PROCESS_BYTES
from pydtnn.parallel.pipeline.check import most_in_flight, plan_of
from pydtnn.perfmodel.compression import find_compression
from pydtnn.perfmodel.compute import ComputeCosts
from pydtnn.perfmodel.dry_step import DryStep, inner_position
from pydtnn.perfmodel.formulas import Placement
from pydtnn.perfmodel.messages import MessageCosts, duration
from pydtnn.perfmodel.outline import Outline
from pydtnn.perfmodel.pipeline import StageTime, carry_out
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.strategy import Strategy
from pydtnn.perfmodel.task import Task
from pydtnn.perfmodel.timing import (
    StepTime,
    Tables,
    gradients_exposed,
    pass_time,
    step_time,
    update_seconds,
)
from pydtnn.training.checks import DEFAULT_PER_STAGE

SCRATCH = 0.75
"""Memory of a schedule for parts of arrays that are received and added, relative to the gradients,
while all buckets are in progress."""


@dataclass(frozen=True)
class Memory:
    """Memory of a rank at the peak of a step, in B.

    Attributes
    ----------
    parameters, gradients, slots : float
    activations : float
        All other arrays of the passes, with the batch.
    other : float
        Scratch memory of kernels, buffers of messages, and the process itself.
    """

    parameters: float
    gradients: float
    slots: float
    activations: float
    other: float

    @property
    def total(self) -> float:
        """Sum of all."""
        return self.parameters + self.gradients + self.slots + self.activations + self.other


@dataclass(frozen=True)
class Projection:
    """Predicted training with a strategy.

    Attributes
    ----------
    task : Task
    strategy : Strategy
    samples : int
        Samples of a rank in a step.
    step : StepTime
        Of the slowest stage if there is a pipeline.
    loader : float
        Time by which the loader delays a step, in s.
    checkpoint : float
        Time of a checkpoint after each epoch, in s.
    memory : Memory
    stage : int
        The stage with the most memory.
    """

    task: Task
    strategy: Strategy
    samples: int
    step: StepTime
    loader: float
    checkpoint: float
    memory: Memory
    stage: int = 0

    @property
    def seconds(self) -> float:
        """Time of a step, in s."""
        return self.step.seconds + self.loader

    @cached_property
    def epoch(self) -> float:
        """Time of an epoch with a checkpoint, in s."""
        return self.task.steps * self.seconds + self.checkpoint

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.task.global_batch / self.seconds


class Projector:
    """Projections of strategies for one task and platform.

    Parameters
    ----------
    task : Task
    platform : Platform
    costs : ComputeCosts
    backend : Backend, optional
        The backend whose allocations are counted; nothing is computed.
    """

    def __init__(
        self,
        task: Task,
        platform: Platform,
        costs: ComputeCosts,
        backend: Backend | None = None,
    ) -> None:
        self.task, self.platform, self.costs = task, platform, costs
        self.backend = backend or create_backend("cpu", threads=platform.compute.threads)
        self._steps: dict[Any, DryStep] = {}
        self._tables: dict[Any, Tables | ValueError] = {}
        self._compression = lru_cache(maxsize=None)(
            lambda name, options: find_compression(name, dict(options), platform.rank_bandwidth)
        )

    def with_platform(self, platform: Platform, costs: ComputeCosts) -> Projector:
        """Return a projector for another platform, with the same outlines."""
        other = Projector(self.task, platform, costs, self.backend)
        other._steps = self._steps
        for key, found in self._tables.items():
            known = found if isinstance(found, ValueError) else Tables(found.outline, costs)
            other._tables[key] = known
        return other

    def with_task(self, task: Task) -> Projector:
        """Return a projector for another batch of the same network, with the same outlines."""
        other = Projector(task, self.platform, self.costs, self.backend)
        other._steps, other._tables = self._steps, self._tables
        return other

    def tables(self, strategy: Strategy, stage: int = 0) -> Tables:
        """Return the outline of a rank, with its costs; computed once.

        Parameters
        ----------
        strategy : Strategy
        stage : int
            Of a pipeline.

        Raises
        ------
        ValueError
            If the plan does not fit the network.
        """
        place = (*strategy.cut.items(), repr(strategy.plan), stage)
        key = (*place, strategy.recompute, self._between(strategy))
        if key not in self._tables:
            try:
                step = self._dry_step(strategy, place, stage)
                found: Tables | ValueError = Tables(step.outline(strategy.recompute), self.costs)
            except ValueError as error:
                found = error
            alike = not isinstance(found, Tables) or step.same_buckets
            for between in (False, True) if alike else key[-1:]:
                self._tables[*key[:-1], between] = found
        found = self._tables[key]
        if isinstance(found, ValueError):
            raise found
        return found

    def _dry_step(self, strategy: Strategy, place: tuple[Any, ...], stage: int) -> DryStep:
        """Return the network of a rank, which is built once for all kinds of recomputation."""
        between = self._between(strategy)
        step = self._steps.get((place, between))
        if step is None:
            cut = strategy.cut
            step = DryStep(
                self.task.net,
                self.task.input_shape,
                self.backend,
                cut,
                position={**inner_position(cut), **({PIPELINE: stage} if PIPELINE in cut else {})},
                plan=strategy.plan if cut else None,
                dtype=self.task.dtype,
                between_hosts=between,
                own_bytes=self.task.bucket_bytes,
            )
            for own in (False, True) if step.same_buckets else (between,):
                self._steps[place, own] = step
        return step

    def _between(self, strategy: Strategy) -> bool:
        """Return whether the ranks along "data" are on several hosts."""
        own, per_host = strategy.data, self.platform.cluster.ranks_per_host
        if own == 1:
            return False
        return Placement.along(own, strategy.stride("data"), per_host, strategy.ranks).hosts > 1

    def project(self, strategy: Strategy) -> Projection:
        """Predict training with a strategy.

        Raises
        ------
        ValueError
            If the strategy is not possible: fewer samples than ranks, or a plan that does not fit.
        """
        batch = self.task.global_batch
        if strategy.data > batch:
            raise ValueError(
                f"{strategy.name}: expected at least one sample for each of {strategy.data} ranks, "
                f"got a global batch of {batch}; use fewer ranks or a larger batch"
            )
        samples = ceil(batch / strategy.data)
        compression = None
        if strategy.compress and strategy.data > 1:
            options = tuple(sorted(strategy.compress_options.items()))
            compression = self._compression(strategy.compress, options)
        messages = MessageCosts(self.platform, strategy, compression)
        if strategy.stages > 1:
            return self._project_stages(strategy, messages, samples)
        tables = self.tables(strategy)
        step = step_time(tables, messages, samples, slots=self.task.slots, clips=self.task.clips)
        memory = self._memory(strategy, tables.outline, samples, 1)
        return self._complete(strategy, samples, step, memory, [tables.outline])

    def _complete(
        self,
        strategy: Strategy,
        samples: int,
        step: StepTime,
        memory: Memory,
        outlines: list[Outline],
        stage: int = 0,
    ) -> Projection:
        storage, outline, threads = self.platform.storage, outlines[0], self.task.loader_threads
        loading = samples * storage.sample
        if storage.loader:
            loading += samples * outline.input_bytes / storage.loader
        state = sum(one.memory.values + self.task.slots * one.memory.trained for one in outlines)
        return Projection(
            task=self.task,
            strategy=strategy,
            samples=samples,
            step=step,
            loader=max(loading / threads - step.seconds, 0.0) if threads else loading,
            checkpoint=state / storage.write if storage.write else 0.0,
            memory=memory,
            stage=stage,
        )

    def _memory(self, strategy: Strategy, outline: Outline, samples: int, in_flight: int) -> Memory:
        own = outline.memory
        sharded = strategy.scheme == "sharded"
        flat = own.values + own.gradients + own.copies
        kept = (in_flight - 1) * own.kept(samples)
        buffers = 2.0 * own.trained if strategy.compress else 0.0
        if sharded:
            largest = max((bucket.nbytes for bucket in outline.buckets), default=0)
            buffers += (2 + 1 / strategy.data) * largest  # as `virtual.communicator.Buffers`
        elif self._between(strategy) and not strategy.compress:
            buffers += SCRATCH * own.trained
        if self.task.averages:  # and an array as long as the largest bucket
            largest = max((bucket.nbytes for bucket in outline.buckets), default=0)
            buffers += own.trained + largest
        return Memory(
            parameters=own.values + own.copies,
            gradients=own.gradients,
            slots=self.task.slots * own.trained / (strategy.data if sharded else 1),
            activations=max(own.peak.at(samples) - flat, 0.0) + kept,
            other=own.scratch + buffers + PROCESS_BYTES,
        )

    # -- pipelines --------------------------------------------------------------------------------

    def _project_stages(
        self, strategy: Strategy, messages: MessageCosts, samples: int
    ) -> Projection:
        stages = strategy.stages
        parts = min(strategy.micro_batches or DEFAULT_PER_STAGE * stages, samples)
        own = ceil(samples / parts)
        plan = plan_of(strategy.schedule, stages, parts)
        tables = [self.tables(strategy, stage) for stage in range(stages)]
        passes = [pass_time(one, messages, own) for one in tables]
        times = [
            StageTime(
                one.forward,
                one.backward,
                duration(messages.stage(own * table.outline.transfer.sent)),
                duration(messages.stage(own * table.outline.transfer.received)),
            )
            for one, table in zip(passes, tables, strict=True)
        ]
        ends = carry_out(plan, times)
        slowest = max(range(stages), key=lambda k: passes[k].forward + passes[k].backward)
        exposed = [gradients_exposed(one, messages, own) for one in tables]
        shards = strategy.data if strategy.scheme == "sharded" else 1
        slots, clips = self.task.slots, self.task.clips
        updates = [
            messages.slowdown * update_seconds(one.outline, self.platform, slots, shards, clips)
            for one in tables
        ]
        last = max(end + e + u for end, e, u in zip(ends, exposed, updates, strict=True))
        layers = tuple(
            replace(
                layer,
                forward=parts * layer.forward,
                backward=parts * layer.backward,
                recomputed=parts * layer.recomputed,
                exchange=parts * layer.exchange,
            )
            for layer in passes[slowest].layers
        )
        sums = {
            name: sum(getattr(layer, name) for layer in layers)
            for name in ("forward", "backward", "recomputed", "exchange")
        }
        working = sum(sums.values()) + exposed[slowest] + updates[slowest]
        sent = duration(messages.stage(own * tables[slowest].outline.transfer.sent))
        step = StepTime(
            forward=sums["forward"],
            backward=sums["backward"],
            recomputed=sums["recomputed"],
            other=messages.slowdown * tables[slowest].step(own),
            update=updates[slowest],
            layers_exposed=sums["exchange"],
            gradients_exposed=exposed[slowest],
            idle=max(last - working, 0.0),
            busy=parts * (passes[slowest].busy + 2 * sent),
            layers=layers,
        )
        memories = [
            self._memory(strategy, one.outline, own, most_in_flight(actions))
            for one, actions in zip(tables, plan, strict=True)
        ]
        largest = max(range(stages), key=lambda k: memories[k].total)
        outlines = [one.outline for one in tables]
        return self._complete(strategy, samples, step, memories[largest], outlines, largest)
