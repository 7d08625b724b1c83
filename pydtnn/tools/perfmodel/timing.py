"""The time of a training step, from its outline, costs of compute and a platform.

The events of the outline are followed on one rank: compute advances its clock, collectives of
layers and sums of gradients are rounds on its links (`pydtnn.tools.perfmodel.overlap`), which make
progress between layers; a wait ends when the last round does. If the ranks of a host have fewer
cores than threads, compute takes longer by that ratio, as if all of them computed at all times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pydtnn.tools.perfmodel.compute import ComputeCosts, Label
from pydtnn.tools.perfmodel.compute.analytic import accesses
from pydtnn.tools.perfmodel.messages import MessageCosts
from pydtnn.tools.perfmodel.outline import (
    BucketOutline,
    BucketReady,
    Event,
    Finish,
    NodeWork,
    Outline,
    RepeatedBlock,
    Start,
)
from pydtnn.tools.perfmodel.overlap import Channel, InFlight, InTransit, Round
from pydtnn.tools.perfmodel.prediction import LayerTime, StepTime

STEP = Label("phase", "step", 0)

SETTLED = 1e-6
"""Relative difference of times below which equal blocks take equally long."""


@dataclass(eq=False)
class Tables:
    """Costs of the segments of an outline's passes, by numbers of samples.

    Parameters
    ----------
    outline : Outline
    costs : ComputeCosts
    known : dict
        What `of` has computed, by number of samples; outlines with the same segments share it.
    """

    outline: Outline
    costs: ComputeCosts
    known: dict[int, dict[int, float]]

    def of(self, samples: int) -> Mapping[int, float]:
        """Return the seconds of each segment, by the identity of its event."""
        if samples not in self.known:
            self.known[samples] = {
                id(event): self.costs.seconds(event.label, event.layer, samples)
                for event in (*self.outline.forward, *self.outline.backward)
                if isinstance(event, NodeWork)
            }
        return self.known[samples]

    def step(self, samples: int) -> float:
        """Return the time of Python outside of layers, in s."""
        return self.costs.seconds(STEP, None, samples)


class StepClock:
    """One rank's main thread during a step."""

    def __init__(
        self,
        tables: Tables,
        messages: MessageCosts,
        samples: int,
        links: Sequence[list[InTransit]] = (),
    ) -> None:
        self.tables, self.seconds = tables, tables.of(samples)
        self.messages, self.samples = messages, samples
        self.slowdown = messages.slowdown
        self.now = 0.0
        self.channel = Channel(links)
        self.parts: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
        self.gradient_work = self.later = 0.0
        self._half = ""  # of backward
        self._computed: list[float] = []  # since this rank has waited for others
        self.gathers = messages.waits and messages.work.scheme == "sharded_parameters"
        self._gathered: dict[int, InFlight] = {}  # of the buckets that this rank has
        self._waiting: list[tuple[BucketOutline, InFlight]] = []  # for sums along other axes

    def run(self, events: Sequence[Event], buckets: Sequence[BucketOutline] = ()) -> None:
        """Follow the events of a pass; the buckets are exchanged if they are given."""
        started: dict[int, tuple[InFlight, str]] = {}
        before_event: Event | None = None
        for event in events:
            if isinstance(event, NodeWork):
                if self._half == "parameters" and not event.later:
                    continue
                if self.gathers and not event.label.index:
                    self._gather(*event.part)
                seconds = self.slowdown * self.seconds[id(event)]
                self.later += event.later * seconds
                seconds *= {"": 1.0, "parameters": event.later}.get(self._half, 1 - event.later)
                self.now += seconds
                if seconds:
                    self._computed.append(seconds)
                node, kind = event.part
                self.parts[node][kind] += seconds
                before, self.now = self.now, self.channel.poll(self.now)
                self.gradient_work += self.now - before
            elif self._half == "parameters" and isinstance(event, Start | Finish):
                continue
            elif isinstance(event, Start):
                rounds = self.messages.layer(event, self.samples)
                started[event.number] = self.start(rounds, self.parts[event.node]), event.node
            elif isinstance(event, Finish):
                operation, node = started.pop(event.number)
                before = self.now
                self._await_slowest()
                self.now = self.channel.wait(operation, self.now)
                self.parts[node][3] += self.now - before
            elif isinstance(event, RepeatedBlock):
                self._repeat(event, buckets)
            elif buckets:
                if not isinstance(before_event, BucketReady):
                    self._pass_on()
                self._ready(buckets[event.bucket])
            before_event = event

    def act(self, kind: str, part: int, samples: int, last: bool = False) -> float:
        """Carry out an action of a stage of this rank of a pipeline; return its time, in s.

        In the `last` one of a stage that computes gradients of parameters, buckets are exchanged.
        """
        before, outline = self.now, self.tables.outline
        self.seconds, self.samples = self.tables.of(samples), samples
        kind, _, self._half = kind.partition("_")
        events = outline.forward if kind == "forward" else outline.backward
        self.run(outline.of_part(events, part), outline.buckets if last else ())
        if last:
            self._pass_on()
        return self.now - before

    def start(self, rounds: Sequence[Round], part: list[float] | None = None) -> InFlight:
        """Start an operation, of gradients or of a layer with the times `part`."""
        operation = self.channel.start(rounds, self.now)
        if part is None:
            self.gradient_work += operation.posted - self.now
        else:
            part[3] += operation.posted - self.now
        self.now = operation.posted
        return operation

    def _repeat(self, event: RepeatedBlock, buckets: Sequence[BucketOutline]) -> None:
        """Follow events until each time adds the same, and add the others at once."""
        left, last = event.times, None
        while left:
            left -= 1
            before, computed = self._state(), [*self._computed]
            self._gathered = {k + event.shift: one for k, one in self._gathered.items()}
            self.run(event.events, buckets)
            change = self._state() - before
            same = last is not None and np.allclose(change, last, SETTLED, SETTLED * change[0])
            if same and min(change[4:6]) > -SETTLED * change[0]:
                break
            last = change
        if self._computed[: len(computed)] == computed:
            self._computed += left * self._computed[len(computed) :]
        change *= left
        self.now, self.gradient_work, self.later = (
            np.array([self.now, self.gradient_work, self.later]) + change[:3]
        ).tolist()
        for part, more in zip(self.parts.values(), change[6:].reshape(-1, 4), strict=True):
            part[:] = (np.array(part) + more).tolist()
        time, busy, transfers, work = change[[0, 3, 4, 5]].tolist()
        self.channel.skip(time, busy, transfers, work, self.now)

    def _state(self) -> np.ndarray:
        """Return the sums so far: of times, transfers, pending transfers and work, and layers."""
        sums = self.now, self.gradient_work, self.later, self.channel.busy
        return np.array([*sums, *self.channel.pending(self.now), *chain(*self.parts.values())])

    def _ready(self, bucket: BucketOutline) -> None:
        """Start the sums of a bucket, as `pydtnn.training.axis_sums`."""
        *axes, last = [axis for axis in bucket.group if axis != "data"] or [""]
        for axis in axes:
            self._wait(self.start(self.messages.allreduce(axis, bucket.nbytes)))
        if last or self._waiting:
            rounds = self.messages.allreduce(last, bucket.nbytes) if last else ()
            self._waiting.append((bucket, self.start(rounds)))
        else:
            self._exchange(bucket)

    def _pass_on(self) -> None:
        """Wait for the sums along other axes of earlier layers, and start those along "data"."""
        for bucket, operation in self._waiting:
            self._wait(operation)
            self._exchange(bucket)
        self._waiting.clear()

    def _exchange(self, bucket: BucketOutline) -> None:
        operation = self.start(self.messages.along_data(bucket))
        if self.messages.waits:
            self._wait(operation)

    def _gather(self, node: str, kind: int) -> None:
        """Gather the parameters that the next pass reads, and start with later ones."""
        if (node, kind % 2) not in self.tables.outline.reads:
            return
        now, ahead = self.tables.outline.reads[node, kind % 2]
        needed = now if kind == 2 else (*now, *ahead)  # a repeated pass gathers nothing in advance
        for bucket in self._gathered.keys() - needed:  # it is released
            self._wait(self._gathered.pop(bucket))
        for bucket in needed:
            if bucket not in self._gathered:
                rounds = self.messages.gather(self.tables.outline.buckets[bucket])
                hidden = [
                    min(one.transfer, one.calls) for one in rounds
                ]  # travels while messages are posted
                self.channel.busy += sum(hidden)
                pairs = zip(rounds, hidden, strict=True)
                rounds = tuple(one._replace(transfer=one.transfer - own) for one, own in pairs)
                self._gathered[bucket] = self.start(rounds)
        for bucket in now:
            self._wait(self._gathered[bucket])

    def _wait(self, operation: InFlight) -> None:
        """Wait for parameters or gradients."""
        before = self.now
        if not operation.done:
            self._await_slowest()
            self.now = self.channel.wait(operation, self.now)
        self.gradient_work += self.now - before

    def _await_slowest(self) -> None:
        """Wait for the slowest rank: what varies from pass to pass averages out over several."""
        compute, passes = self.messages.platform.compute, len(self._computed)
        if passes:
            varying = (compute.slowest_pass - compute.slowest_step) / passes**0.5
            self.now += (compute.slowest_step - 1 + max(varying, 0.0)) * sum(self._computed)
            self._computed.clear()

    def proceed(self) -> None:
        """Wait for the next messages of sums."""
        before, self.now = self.now, self.channel.proceed(self.now)
        self.gradient_work += self.now - before

    def finish(self) -> None:
        """Wait for all sums of gradients, and exchange those that the update exchanges."""
        self._pass_on()
        before = self.now
        if self.messages.work.data > 1:
            self._await_slowest()
        self.now = self.channel.finish(self.now)
        for (_, nbytes), times in self.tables.outline.sizes.items():
            rounds = self.messages.update(nbytes)  # which begin when the last ones have ended
            operation = self.channel.start(rounds, self.now)
            time = self.channel.wait(operation, operation.posted) - self.now
            busy = sum(one.transfer for one in rounds)
            self.now += times * time
            self.channel.skip((times - 1) * time, (times - 1) * busy, 0.0, 0.0, self.now)
        self.gradient_work += self.now - before

    def layers(self) -> tuple[LayerTime, ...]:
        """Return the times of layers in the order of execution."""
        return tuple(LayerTime(name, *parts) for name, parts in self.parts.items())


def update_seconds(tables: Tables, messages: MessageCosts) -> float:
    """Return the time of the optimizer's update of this rank's parameters, in s."""
    work, platform = messages.work, messages.platform
    moved = accesses(work.slots, work.clipping) * tables.outline.memory.trained / work.parts
    return messages.slowdown * moved / platform.update_bandwidth


def step_time(tables: Tables, messages: MessageCosts, sizes: Sequence[int]) -> StepTime:
    """Return the time of a step without a pipeline, of micro-batches of so many samples."""
    clock = StepClock(tables, messages, sizes[0])
    for left, samples in enumerate(sizes, start=1 - len(sizes)):  # sums are those of the last
        clock.seconds, clock.samples = tables.of(samples), samples
        clock.run(tables.outline.forward)
        if not left:
            clock.start(messages.losses)
        clock.run(tables.outline.backward, () if left else tables.outline.buckets)
    clock.finish()
    samples = sizes[0]
    return StepTime(
        clock.layers(),
        other=messages.slowdown * tables.step(samples),
        update=update_seconds(tables, messages),
        gradients_exposed=clock.gradient_work,
        busy=clock.channel.busy,
    )
