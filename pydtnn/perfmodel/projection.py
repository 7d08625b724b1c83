"""Projections: time and memory of strategies, from outlines that are computed once."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import lru_cache
from math import ceil
from typing import Any

from pydtnn.comm.schedules.auto import RULE
from pydtnn.kernels import Backend, create_backend
from pydtnn.model.memory import PROCESS_BYTES
from pydtnn.parallel.pipeline.check import StageTime, carry_out, most_in_flight, plan_of
from pydtnn.parallel.pipeline.schedules import placement
from pydtnn.perfmodel.compression import find_compression
from pydtnn.perfmodel.compute import ComputeCosts
from pydtnn.perfmodel.dry_step import DryStep
from pydtnn.perfmodel.formulas import Placement
from pydtnn.perfmodel.messages import MessageCosts, duration
from pydtnn.perfmodel.outline import Outline
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.prediction import LayerTime, Memory, Prediction, RankPrediction, StepTime
from pydtnn.perfmodel.timing import Tables, gradients_exposed, pass_time, step_time, update_seconds
from pydtnn.perfmodel.workload import Workload, first_unknown
from pydtnn.training.checks import DEFAULT_PER_RANK

SCRATCH = 0.75
"""Memory of a schedule for parts of arrays that are received and added, relative to the gradients,
while all buckets are in progress; an MPI library has that of whole arrays inside a host."""


KNOWN: dict[str, tuple[Any, ...]] = {
    "device": ("cpu",),
    "tuning": (None, "measure", "fixed"),
    "scheme": ("allreduce", "hierarchical", "sharded"),
    "scheme_options": ({},),
    "allreduce": (RULE,),
    "overlap": (True,),
    "exact": (False,),
    "check_messages": (False,),
    "dtype": ("float32", "float64"),
    "formats": (None,),
    "fusion": (True,),
    "sync_batch_norm": (False,),
    "accumulation": (1,),
    "freeze": ((),),
}
"""Values that have formulas, of fields of a `Workload` that are limited."""


def without_formula(work: Workload, platform: Platform | None = None) -> str:
    """Return the first field whose value has no formula; empty if there is none."""
    if platform is not None and work.threads not in (None, platform.compute.threads):
        return "threads"
    return first_unknown(work, KNOWN)


class Projector:
    """Projections of the training of one network on one platform.

    Parameters
    ----------
    work : Workload
        Those that are projected differ from it in batch, optimizer, and how ranks share it.
    platform : Platform
    costs : ComputeCosts
    backend : Backend, optional
        The backend whose allocations are counted; nothing is computed.
    """

    def __init__(
        self,
        work: Workload,
        platform: Platform,
        costs: ComputeCosts,
        backend: Backend | None = None,
    ) -> None:
        self.work, self.platform, self.costs = work, platform, costs
        self.backend = backend or create_backend("cpu", threads=platform.compute.threads)
        self._steps: dict[Any, DryStep] = {}
        self._outlines: dict[Any, Outline | ValueError] = {}
        self._tables: dict[int, Tables] = {}
        self._known: dict[int, dict[int, dict[int, float]]] = {}
        self._compression = lru_cache(maxsize=None)(
            lambda name, options: find_compression(name, dict(options), platform.rank_bandwidth)
        )

    def with_platform(self, platform: Platform, costs: ComputeCosts) -> Projector:
        """Return a projector for another platform, with the same outlines."""
        other = Projector(self.work, platform, costs, self.backend)
        other._steps, other._outlines = self._steps, self._outlines
        return other

    def on(self, platform: Platform) -> Projector:
        """Return a projector for another platform, with the same costs there."""
        return self.with_platform(platform, self.costs.on(platform))

    def tables(self, work: Workload, stage: int = 0) -> Tables:
        """Return the outline of a rank, with its costs; computed once.

        Parameters
        ----------
        work : Workload
        stage : int
            Of a pipeline.

        Raises
        ------
        ValueError
            If the plan does not fit the network.
        """
        between = self._between(work)
        cut = (*work.cut.items(), repr(work.plan), work.pipeline_schedule)
        place = (*cut, work.bucket_bytes, stage)
        key = place, between, repr(work.recompute)
        if key not in self._outlines:
            try:
                if place not in self._steps:
                    names = ("axes", "plan", "bucket_bytes", "pipeline_schedule")
                    own = replace(self.work, **{name: getattr(work, name) for name in names})
                    self._steps[place] = DryStep(own, self.backend, stage=stage)
                step = self._steps[place]
                found: Outline | ValueError = step.outline(work.recompute, between_hosts=between)
            except ValueError as error:
                found = error
            self._outlines[key] = found
        found = self._outlines[key]
        if isinstance(found, ValueError):
            raise found
        if id(found) not in self._tables:
            known = self._known.setdefault(id(found.forward), {})  # has the same segments
            self._tables[id(found)] = Tables(found, self.costs, known)
        return self._tables[id(found)]

    def _between(self, work: Workload, axis: str = "data") -> bool:
        """Return whether the ranks along an axis are on several hosts."""
        own, per_host = work.axes.get(axis, 1), self.platform.cluster.ranks_per_host
        if own == 1:
            return False
        return Placement.along(own, work.stride(axis), per_host, work.ranks).hosts > 1

    def check(self, work: Workload) -> None:
        """Raise ValueError if there is no formula for a value of a field."""
        if name := without_formula(work, self.platform):
            raise ValueError(
                f"{work.strategy}: there is no formula for {name} {getattr(work, name)!r} on "
                f"{self.platform.name}; omit it, or use virtual ranks"
            )

    def project(self, work: Workload) -> Prediction:
        """Predict training.

        Raises
        ------
        ValueError
            If there is no formula for a value of a field, or training is not possible: fewer
            samples than ranks, or a plan that does not fit.
        """
        self.check(work)
        samples = work.samples_per_rank
        if work.memory_limit is not None:  # as little is computed again as fits
            full = self.project(replace(work, recompute=None, memory_limit=None))
            if full.memory.total <= work.memory_limit:
                return full
        compression = None
        if work.compress and work.data > 1:
            options = tuple(sorted(work.compress_options.items()))
            compression = self._compression(work.compress, options)
        messages = MessageCosts(self.platform, work, compression)
        if work.stages > 1:
            return self._project_stages(work, messages, samples)
        tables = self.tables(work)
        step = step_time(tables, messages, samples)
        return self._complete(
            work, step, [self._memory(work, tables.outline, samples, 1)], [tables]
        )

    def _complete(
        self, work: Workload, step: StepTime, memories: list[Memory], tables: list[Tables]
    ) -> Prediction:
        """Return the prediction for one rank that stands for all, or one of each stage."""
        own = [one.outline.memory for one in tables]
        state = sum(one.values + work.slots * one.trained for one in own)
        memory = max(memories, key=lambda memory: memory.total)
        return Prediction.of(work, self.platform, [RankPrediction(step, memory)], state)

    def _memory(self, work: Workload, outline: Outline, samples: int, in_flight: float) -> Memory:
        own = outline.memory
        sharded = work.scheme == "sharded"
        kept = (in_flight - 1) * own.kept(samples)
        buffers = 2.0 * own.trained if work.compress else 0.0
        if sharded:
            largest = max((bucket.nbytes for bucket in outline.buckets), default=0)
            buffers += (2 + 1 / work.data) * largest  # as `virtual.communicator.Buffers`
        elif not work.compress:
            for bucket in outline.buckets:  # sums along axes of one kind follow one another
                axes = [axis for axis in bucket.group if work.axes.get(axis, 1) > 1]
                pending = {SCRATCH if self._between(work, axis) else 1.0 for axis in axes}
                buffers += bucket.nbytes * sum(pending)
        if work.ema is not None:  # and an array as long as the largest bucket
            largest = max((bucket.nbytes for bucket in outline.buckets), default=0)
            buffers += own.trained + largest
        return Memory(
            parameters=own.values + own.copies,
            gradients=own.shared if work.uses_up else own.gradients,
            slots=work.slots * own.trained / (work.data if sharded else 1),
            activations=max(own.peak.at(samples) - own.flat, 0.0) + kept,
            scratch=own.scratch,
            messages=buffers,
            process=PROCESS_BYTES,
        )

    # -- pipelines --------------------------------------------------------------------------------

    def _project_stages(self, work: Workload, messages: MessageCosts, samples: int) -> Prediction:
        ranks = work.stages
        parts = min(work.micro_batches or DEFAULT_PER_RANK * ranks, samples)
        own = ceil(samples / parts)
        plan = plan_of(work.pipeline_schedule, ranks, parts)
        owners = placement(work.pipeline_schedule, ranks)
        if len(owners.paths) > 1:
            raise ValueError(f"{work.strategy}: no formula for two directions; use virtual ranks")
        tables = [self.tables(work, rank) for rank in range(ranks)]
        passes = [pass_time(one, messages, own) for one in tables]
        share = ranks / owners.stages  # of a rank's work, of each of its stages
        times = [
            StageTime(
                share * one.forward,
                share * one.backward,
                duration(messages.stage(share * own * table.outline.transfer.sent)),
                duration(messages.stage(share * own * table.outline.transfer.received)),
            )
            for one, table in zip(passes, tables, strict=True)
        ]
        ends = carry_out(plan, [times[owners.of(stage)] for stage in range(owners.stages)]).ends
        slowest = max(range(ranks), key=lambda k: passes[k].forward + passes[k].backward)
        exposed = [gradients_exposed(one, messages, own) for one in tables]
        updates = [update_seconds(one, messages) for one in tables]
        last = max(end + e + u for end, e, u in zip(ends, exposed, updates, strict=True))
        step = StepTime(
            tuple(
                LayerTime(one.name, *(parts * time for time in astuple(one)[1:]))
                for one in passes[slowest].layers
            ),
            other=messages.slowdown * tables[slowest].step(own),
            update=updates[slowest],
            gradients_exposed=exposed[slowest],
            busy=parts * (passes[slowest].busy + 2 * times[slowest].ahead / share),
        )
        working = step.seconds - step.other
        step = replace(step, idle=max(last - working, 0.0))
        memories = [
            self._memory(work, one.outline, own, most_in_flight(actions))
            for one, actions in zip(tables, plan, strict=True)
        ]
        return self._complete(work, step, memories, tables)
