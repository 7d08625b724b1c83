"""Projections: time and memory of strategies, from outlines that are computed once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import astuple, replace
from functools import cache, lru_cache, partial
from math import ceil, inf, prod
from typing import Any

import numpy as np

from pydtnn.comm.schedules.rule import RULE
from pydtnn.data.order import assign_shards
from pydtnn.kernels import Backend, create_backend
from pydtnn.layers.collectives import PIPELINE
from pydtnn.model.memory import PROCESS_BYTES
from pydtnn.model.pipeline import Timetable
from pydtnn.model.pipeline.check import StageTime, carry_out, check, max_in_flight, plan_of
from pydtnn.model.pipeline.schedules import LAST, Action, is_asynchronous, placement
from pydtnn.tools.perfmodel import timing
from pydtnn.tools.perfmodel.blocks import MOST, EqualBlocks
from pydtnn.tools.perfmodel.compression import find_compression
from pydtnn.tools.perfmodel.compute import ComputeCosts
from pydtnn.tools.perfmodel.dry_step import DryStep, Irregular
from pydtnn.tools.perfmodel.messages import OPPOSITE, MessageCosts, duration
from pydtnn.tools.perfmodel.outline import BucketReady, MemoryOutline, Outline, StageBytes
from pydtnn.tools.perfmodel.overlap import InTransit
from pydtnn.tools.perfmodel.patterns import AxisGroups
from pydtnn.tools.perfmodel.pipelines import PipelineClock, StageMessage
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.prediction import (
    LayerTime,
    MemoryUse,
    Prediction,
    RankPrediction,
    StepTime,
)
from pydtnn.tools.perfmodel.timing import StepClock, Tables
from pydtnn.tools.perfmodel.workload_rank import first_unknown
from pydtnn.training.batch_checks import DEFAULT_PER_RANK
from pydtnn.training.workload import SHARDED, Workload

SCRATCH = 0.75
"""Memory of a schedule for parts of arrays that are received and added, relative to the gradients,
while all buckets are in progress; an MPI library has that of whole arrays inside a host."""


PREDICTABLE: dict[str, tuple[Any, ...]] = {
    "device": ("cpu",),
    "tuning": (None, "measure", "fixed"),
    "scheme": ("allreduce", *SHARDED),
    "scheme_options": ({},),
    "allreduce": (RULE,),
    "overlap": (True,),
    "exact": (False,),
    "dtype": ("float32", "float64", "bfloat16"),
    "formats": (None,),
    "fusion": (True,),
    "sync_batch_norm": (False,),
    "freeze": ((),),
}
"""Values that have formulas, of fields of a `Workload` that are limited."""


COMBINED = (
    *("scheme", "scheme_options", "compress", "compress_options", "micro_batches", "data"),
    *("optimizer", "optimizer_options"),
)
"""What decides, besides the network's part, whether a trainer refuses a run."""


def without_formula(work: Workload, platform: Platform | None = None) -> str:
    """Return the first field whose value has no formula; empty if there is none."""
    if platform is not None and work.threads not in (None, platform.compute.threads):
        return "threads"
    copied = work.scheme in SHARDED and [*work.scheme_options] == ["copies"]
    copied = copied and work.copies > 0 and work.data % work.copies == 0
    name = first_unknown(replace(work, scheme_options={}) if copied else work, PREDICTABLE)
    if work.dtype == "bfloat16" and work.scheme == SHARDED[2]:
        return name or "dtype"
    return name or ("compress" if work.compress and work.scheme in SHARDED[1:] else "")


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

    Attributes
    ----------
    blocks : EqualBlocks
        Of the network.
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
        self.blocks = EqualBlocks(work)
        self._steps: dict[Any, DryStep] = {}
        self._outlines: dict[Any, Outline | ValueError] = {}
        self._possible: set[Any] = set()
        self._parts: dict[Any, tuple[tuple[LayerTime, ...], float, MemoryOutline] | None] = {}
        self._stage_bounds: dict[str, float] = {}
        self._tables: dict[int, Tables] = {}
        self._known: dict[int, dict[int, dict[int, float]]] = {}
        self._compression = lru_cache(maxsize=None)(
            lambda name, options: find_compression(name, dict(options), platform.rank_bandwidth)
        )

    def with_platform(self, platform: Platform, costs: ComputeCosts) -> Projector:
        """Return a projector for another platform, with the same outlines."""
        other = Projector(self.work, platform, costs, self.backend)
        other._steps, other._outlines = self._steps, self._outlines
        other._possible = self._possible
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
            If the plan does not fit the network, or a trainer would refuse the run.
        """
        short = self.blocks.shorter(work, stage)
        if short is not None:
            try:
                return self._tables_of(short.work, short.stage, short.blocks, short.times, work)
            except Irregular:
                pass
        return self._tables_of(work, stage, (), 0, work)

    def _tables_of(
        self, work: Workload, stage: int, blocks: tuple[str, ...], times: int, whole: Workload
    ) -> Tables:
        """Return the outline of a rank of a network, in which a block is repeated."""
        between = self._between(whole)
        cut = (*work.cut.items(), repr(work.plan), work.pipeline_schedule)
        place = (*cut, work.bucket_bytes, stage, blocks)
        key = place, between, repr(work.recompute), times
        if key not in self._outlines:
            try:
                if place not in self._steps:
                    names = ("model", "axes", "plan", "bucket_bytes", "pipeline_schedule")
                    own = replace(self.work, **{name: getattr(work, name) for name in names})
                    self._steps[place] = DryStep(own, self.backend, stage=stage, blocks=blocks)
                step = self._steps[place]
                once = step.outline(work.recompute, between_hosts=between)
                found: Outline | ValueError = once.repeated(times)
            except ValueError as error:
                found = error
            self._outlines[key] = found
        found = self._outlines[key]
        if isinstance(found, ValueError):
            raise found
        run = place, *(repr(getattr(work, name)) for name in COMBINED)
        if run not in self._possible:
            work.check(self._steps[place].model)
            self._possible.add(run)
        if id(found) not in self._tables:
            known = self._known.setdefault(id(found.forward[0]), {})  # has the same segments
            self._tables[id(found)] = Tables(found, self.costs, known)
        return self._tables[id(found)]

    def _between(self, work: Workload) -> bool:
        """Return whether the ranks along "data" are on several hosts."""
        own, per_host = work.data, self.platform.cluster.ranks_per_host
        return own > 1 and AxisGroups(own, work.stride("data"), per_host, work.ranks).hosts > 1

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
                samples than ranks, a plan that does not fit, or features that cannot be combined
            (`pydtnn.training.capabilities`).
        """
        self.check(work)
        if work.memory_limit is not None:  # as little is computed again as fits
            full = self.project(replace(work, recompute=None, memory_limit=None))
            if full.memory.total <= work.memory_limit:
                return full
        memories, compression = self.memories(work), None
        if work.compress and work.data > 1:
            options = tuple(sorted(work.compress_options.items()))
            compression = self._compression(work.compress, options)
        messages = MessageCosts(self.platform, work, compression)
        step = self._project_stages(messages) if work.stages > 1 else self._project_one(messages)
        own = [self.tables(work, stage).outline.memory for stage in range(work.stages)]
        state = sum(one.values + work.slots * one.trained for one in own)
        memory = max(memories, key=lambda memory: memory.total)
        return Prediction(work, self.platform, (RankPrediction(step, memory),), state)

    def _project_one(self, messages: MessageCosts) -> StepTime:
        work, places = messages.work, messages.replicas()
        at = partial(messages.at, "data") if len(places) > 1 else lambda place: messages
        steps = [timing.step_time(self.tables(work), at(k), _sizes_of(work, k)) for k in places]
        return max(steps, key=lambda step: step.seconds)

    def memories(self, work: Workload) -> list[MemoryUse]:
        """Return the memory of one rank that stands for all, or of one of each stage.

        Raises
        ------
        ValueError
            As by `project`.
        """
        messages, kept = MessageCosts(self.platform, work), [1.0]
        samples = ceil(work.samples_per_rank / work.accumulation)
        if work.stages > 1:
            samples, *others = _sizes_of(work)
            plan = plan_of(work.pipeline_schedule, work.stages, 1 + len(others))
            kept = [max_in_flight(actions) for actions in plan]
        return [
            self._memory(messages, self.tables(work, stage).outline, samples, in_flight)
            for stage, in_flight in enumerate(kept)
        ]

    def least(self, work: Workload, *, together: bool = False) -> tuple[float, float]:
        """Return a time of a step and a memory of a rank that a run hardly falls below.

        Each axis divides what a rank computes, exchanges and stores at most by its ranks. So the
        same ranks take as long at most, and have as much memory at most, with more of them along
        "data" and less along other axes than one, without sums of gradients; but a pipeline keeps
        values of a part of the samples, and recomputation few.

        Parameters
        ----------
        work : Workload
        together : bool
            Whether other axes have a few ranks instead of one, which decide what is exchanged.
        """
        seconds, memory, kept, waits = 0.0, 0.0, float(work.recompute is None), 1.0
        if work.stages > 1:
            schedule, stages = work.pipeline_schedule, work.stages
            waits, kept_part = _equal_stages(schedule, stages, _micro_batches(work))
            kept *= kept_part
        cut = {axis: n for axis, n in work.cut.items() if axis != PIPELINE}
        few = {axis: next(k for k in range(2, n + 1) if n % k == 0) for axis, n in cut.items()}
        released = SHARDED.index(work.scheme) if work.parts > 1 else 0
        count = self.blocks.count  # of which all but those at the ends are computed again
        again = 1 - 2 / count if work.recompute is not None and count > MOST else 0.0
        for axis in cut or ("data",):
            axes = (few if together else {}) | ({axis: cut[axis]} if cut else {})
            one = self._alone(tuple(axes.items()), work.ranks, work.batch)
            if one is None:
                continue
            layers, arrays, own = one
            parts = [layer.forward * (1 + again) + layer.backward for layer in layers]
            if together or len(cut) < 2:
                parts += [layer.exchange for layer in layers]
            ranks = prod(axes.values())
            part = min(work.batch * ranks / work.ranks, 1.0)  # of a sample
            seconds = max(seconds, part * waits * sum(parts))
            state = work.slots * own.trained / work.parts
            state += (own.values if released < 2 else 0) + (own.gradients if released < 1 else 0)
            memory = max(memory, part * kept * arrays + state * ranks / prod(work.cut.values()))
        return seconds, memory

    def least_of_stages(self, work: Workload) -> float:
        """Return a time that a step of a pipeline exceeds.

        Its actions take at least as long as without messages between stages, sums and gathers:
        these only delay what shares links or a processor with them. Neither the update nor the loss
        is counted, so that rounding is less.
        """
        plain = replace(work, scheme="allreduce", scheme_options={}, compress=None)
        if (key := repr(plain)) not in self._stage_bounds:
            self._stage_bounds[key] = _Stages(self, MessageCosts(self.platform, plain)).least()
        return self._stage_bounds[key]

    def _alone(
        self, axes: tuple[tuple[str, int], ...], ranks: int, batch: int
    ) -> tuple[tuple[LayerTime, ...], float, MemoryOutline] | None:
        """Return what `least` needs of a few axes and "data": of a sample if there are fewer."""
        key = axes, ranks, batch
        if key not in self._parts:
            others = prod(n for _, n in axes)
            work = self.work.along({"data": ranks // others, **dict(axes)})
            messages, samples = MessageCosts(self.platform, work), max(batch * others // ranks, 1)
            try:
                tables = self.tables(work)
            except ValueError:
                self._parts[key] = None
            else:
                kept = self._memory(messages, tables.outline, samples, 1).activations
                clock = StepClock(tables, messages, samples)
                for kind in ("forward", "backward"):
                    clock.act(kind, 0, samples)
                self._parts[key] = clock.layers(), kept, tables.outline.memory
        return self._parts[key]

    def _memory(
        self, messages: MessageCosts, outline: Outline, samples: int, in_flight: float
    ) -> MemoryUse:
        own, work, groups = outline.memory, messages.work, messages.groups
        kept = (in_flight - 1) * own.kept(samples)
        buffers = 2.0 * own.trained if work.compress else 0.0
        sizes = sorted(nbytes for _, nbytes in outline.sizes.elements()) or [0]
        others = [(1 - 1 / work.parts) * nbytes for nbytes in sizes]  # parts of other ranks
        if work.stages > 1 and is_asynchronous(work.pipeline_schedule, work.stages):
            buffers += own.trained  # the second version of the weights
        if work.parts > 1:
            buffers += (2 + 1 / work.parts) * sizes[-1]  # as `virtual.communicator.Buffers`
        if not work.compress:
            longest = Counter[tuple[str, ...]]()
            for (group, nbytes), times in outline.sizes.items():
                longest[group] += times * nbytes
            for group, nbytes in longest.items():  # sums along axes of one kind follow one another
                axes = {*group, OPPOSITE} - ({"data"} if work.parts > 1 else set())
                hosts = [groups[a].hosts for a in axes if a in groups and groups[a].ranks > 1]
                buffers += nbytes * sum({SCRATCH if n > 1 else 1.0 for n in hosts})
        if work.ema is not None:  # and an array as long as the largest bucket
            buffers += own.trained + sizes[-1]
        released = SHARDED.index(work.scheme) if work.parts > 1 else 0  # gradients, then values
        return MemoryUse(
            parameters=own.values + own.copies - (sum(others[:-2]) if released > 1 else 0),
            gradients=(own.shared if work.uses_up else own.gradients)
            - (sum(others[:-1]) if released and work.accumulation == 1 else 0),
            slots=work.slots * own.trained / work.parts,
            activations=max(own.peak.at(samples), 0.0) + kept,
            scratch=own.scratch,
            messages=buffers,
            process=PROCESS_BYTES,
        )

    # -- pipelines --------------------------------------------------------------------------------

    def _project_stages(self, messages: MessageCosts) -> StepTime:
        stages, work = _Stages(self, messages), messages.work
        sizes, tables = stages.sizes, stages.tables
        counts = [
            Counter((a.stage, sizes[a.micro_batch]) for a in actions if a.kind == "forward")
            for actions in stages.plan
        ]
        computed = [
            sum(times * sum(stages.alone(rank, *key)[0].values()) for key, times in own.items())
            for rank, own in enumerate(counts)
        ]
        slowest = computed.index(max(computed))
        updates = [timing.update_seconds(one, messages) for one in tables]
        ends = []
        for place, own in messages.replicas().items():
            replica = _sizes_of(work, place), stages.members(own)
            ends.append((stages.run(*replica, updates), replica))
        (end, after, exposed, sent), replica = max(ends, key=lambda one: one[0][0])
        if max(after) > 1e-3 * end:  # ranks begin the next step at other times
            end, after, exposed, sent = stages.run(*replica, np.add(updates, after).tolist())
        layers: dict[str, Any] = defaultdict(lambda: np.zeros(4))
        busy = sent[slowest]
        for key, n in counts[slowest].items():
            _, parts_of, transfers = stages.alone(slowest, *key)
            busy += n * transfers
            for layer in parts_of:
                layers[layer.name] += n * np.array(astuple(layer)[1:])
        step = StepTime(
            tuple(LayerTime(name, *parts.tolist()) for name, parts in layers.items()),
            other=messages.slowdown * tables[slowest].step(sizes[0]),
            update=updates[slowest],
            gradients_exposed=exposed[slowest],
            busy=busy,
        )
        working = step.seconds - step.other
        return replace(step, idle=max(end - working, 0.0))


SETTLED = 1e-3
"""Relative difference of the times of two equal actions after which further ones take as long."""


@lru_cache(maxsize=256)
def _equal_stages(schedule: Any, ranks: int, micro_batches: int) -> tuple[float, float]:
    """Return the time of a step relative to its compute, and the part of a batch that is kept."""
    line = check(schedule, ranks, micro_batches)
    one = 1.0 if is_asynchronous(schedule, ranks) else 1 / (1 - line.bubble)
    return one, min(line.in_flight[0] / micro_batches, 1.0)


class _Stages:
    """The ranks of a pipeline."""

    def __init__(self, projector: Projector, messages: MessageCosts) -> None:
        self.messages, work = messages, messages.work
        self.sizes, schedule = _sizes_of(work), work.pipeline_schedule
        self.plan = plan_of(schedule, work.stages, len(self.sizes))
        self.owners = owners = placement(schedule, work.stages)
        self.tables = tables = [projector.tables(work, rank) for rank in range(work.stages)]
        self.two = OPPOSITE in messages.groups  # directions
        stride, per_host = work.stride(PIPELINE), messages.platform.cluster.ranks_per_host
        places, at = range(len(tables)), cache(partial(messages.at, PIPELINE))
        self.costs = [  # those of an earlier one with as many ranks of its groups on each host
            at(next(k for k in places if (rank - k) * stride % per_host == 0)) for rank in places
        ]
        self.parts = [{s: i for i, s in enumerate(owners.stages_of(rank))} for rank in places]
        kinds = [*zip(map(id, tables), map(id, self.costs), strict=True)]
        self.first = [kinds.index(kind) for kind in kinds]
        self.calls, self.alone = cache(self._calls), cache(self._alone)
        self.lasts = {
            (rank, action.stage): action
            for rank, actions in enumerate(self.plan)
            for action in actions
            if action.kind in LAST and not self.two
        }

    def members(self, ranks: np.ndarray) -> list[int]:
        """Return a rank of each place along the pipeline, among some."""
        work = self.messages.work
        places = ranks // work.stride(PIPELINE) % work.stages
        return [int(ranks[places == k][0]) for k in range(work.stages)]

    def clock(self, rank: int, links: Sequence[list[InTransit]] = ()) -> StepClock:
        return StepClock(self.tables[rank], self.costs[rank], 1, links)

    def _calls(self, rank: int, stage: int, side: int) -> float:
        """Return the time to post the values between a stage and one beside it, in s."""
        values, to = self._values(rank, stage)[side], stage + 2 * side - 1
        if not values or self.owners.of(stage) == self.owners.of(to):
            return 0.0
        return len(values) * self.messages.processing.call

    def _values(self, rank: int, stage: int) -> StageBytes:
        return self.tables[rank].outline.transfers[self.parts[rank][stage]]

    def _alone(
        self, rank: int, stage: int, samples: int
    ) -> tuple[dict[str, float], tuple[LayerTime, ...], float]:
        """Return the times of actions without sums, those of layers, and that of transfers."""
        if (first := self.first[rank]) < rank:  # its stages are equal
            return self.alone(first, [*self.parts[first]][self.parts[rank][stage]], samples)
        clock, part = self.clock(rank), self.parts[rank][stage]
        times = {
            kind: clock.act(kind, part, samples) + self.calls(rank, stage, side)
            for kind, side in (("forward", 1), ("backward", 0))
        }
        layers, inputs = clock.layers(), times["backward"] - clock.later
        times |= {"backward_inputs": inputs, "backward_parameters": clock.later}
        return times, layers, clock.channel.busy

    def least(self) -> float:
        """Return the time of the actions of a step if nothing delays them, in s."""

        def time(action: Action) -> StageTime:
            _, number, stage = action
            times, *_ = self.alone(self.owners.of(stage, number), stage, self.sizes[number])
            later = times["backward_parameters"]
            return StageTime(times["forward"], times["backward"], parameters=later)

        return carry_out(self.plan, time).duration

    def run(
        self, samples: Sequence[int], members: Sequence[int], begins: Sequence[float]
    ) -> tuple[float, list[float], list[float], list[float]]:
        """Follow a step of the ranks `members`, which begin it one after the other.

        Returns
        -------
        end : float
            When all have met.
        after, exposed, busy : list of float
            For how long sums delay each rank then; the time of sums that it does not compute in;
            and that of its messages to other stages.
        """
        links: dict[Hashable, list[InTransit]] = defaultdict(list)
        clocks = [
            self.clock(rank, [links[key] for key in self.costs[rank].links(member)])
            for rank, member in enumerate(members)
        ]

        def seconds(rank: int, action: Action, begin: float) -> float:
            kind, number, stage = action
            last, clock = self.lasts.get((rank, stage)) == action, clocks[rank]
            if not last and not clock.gathers:
                return self.alone(rank, stage, samples[number])[0][kind]
            calls = self.calls(rank, stage, action.direction > 0) if action.direction else 0.0
            times = known[rank, kind, stage, samples[number]]
            before, now = times[-2:] if times[1:] and not last else ((inf,), (0.0,))
            if all(abs(a - b) <= SETTLED * now[0] for a, b in zip(before, now, strict=True)):
                own, work, sent = times[-1]  # gathers of further micro-batches take as long
                clock.gradient_work += work
                clock.channel.busy += sent
                return calls + own
            work, sent, clock.now = clock.gradient_work, clock.channel.busy, begin
            own = clock.act(kind, self.parts[rank][stage], samples[number], last)
            times.append((own, clock.gradient_work - work, clock.channel.busy - sent))
            return calls + own

        @cache
        def route(rank: int, stage: int, direction: int, n: int, to: int) -> StageMessage:
            values = self._values(rank, stage)[direction > 0]
            return self.messages.route(rank, to, members, [n * each for each in values])

        def message(action: Action, rank: int, to: int) -> StageMessage:
            found = route(rank, action.stage, action.direction, samples[action.micro_batch], to)
            for one in (rank, to):
                busy[one] += found.busy
            return found

        def call(rank: int, action: Action) -> float:
            return self.calls(rank, action.stage, action.direction < 0)

        busy = [0.0 for _ in clocks]
        known: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
        line = PipelineClock(self.plan, self.owners, seconds, call, message, begins, links).run()
        for rank, clock in enumerate(clocks):
            clock.now = line.ends[rank]
            if self.two:
                outline = self.tables[rank].outline
                opposite = _opposite_exposed(line, rank, self.messages, outline)
                clock.now, clock.gradient_work = clock.now + opposite, opposite
                ready = [event for event in outline.backward if isinstance(event, BucketReady)]
                clock.run(ready, outline.buckets)
        end = max(clock.now for clock in clocks) + duration(self.messages.meetings)
        for clock in clocks:
            clock.now = end
        while (first := min(clocks, key=lambda one: one.channel.arrival)).channel.arrival < inf:
            first.proceed()
        for clock in clocks:
            clock.finish()
        exposed = [clock.gradient_work for clock in clocks]
        return end, [clock.now - end for clock in clocks], exposed, busy


def _micro_batches(work: Workload) -> int:
    pipelined = work.micro_batches or DEFAULT_PER_RANK * work.stages
    return pipelined if work.stages > 1 else work.accumulation


def _sizes_of(work: Workload, rank: int = 0) -> list[int]:
    """Return the samples of the micro-batches of a rank along "data", which are nearly equal."""
    _, shards = assign_shards(work.batch, work.data * _micro_batches(work), rank, work.data)
    return [rows.stop - rows.start for _, rows in shards]


def _opposite_exposed(
    line: Timetable, rank: int, messages: MessageCosts, outline: Outline
) -> float:
    """Return how long a rank waits at the end for the sums over two ranks with its stages, in s."""
    stages, now = line.stages_of(rank), 0.0
    each = sum(duration(messages.allreduce(OPPOSITE, one.nbytes)) for one in outline.buckets)
    for end in sorted(max(e.end for e in line.events if e.action.stage == s) for s in stages):
        now = max(now, end) + each / len(stages)
    return max(now - line.ends[rank], 0.0)
