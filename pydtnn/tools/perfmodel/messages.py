"""The messages of a training step as rounds on the links of a platform."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil

import numpy as np

from pydtnn.comm.schedules.rule import VENDOR, choose
from pydtnn.layers.collectives import PIPELINE
from pydtnn.parallel.pipeline.schedules import placement
from pydtnn.tools.perfmodel import formulas
from pydtnn.tools.perfmodel.compression import Compression
from pydtnn.tools.perfmodel.formulas import NONE, PLAIN, Links, Placed, Placement, Stretch, Terms
from pydtnn.tools.perfmodel.outline import BucketOutline, Start
from pydtnn.tools.perfmodel.overlap import Round
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.stretch import stretch
from pydtnn.training.workload import SHARDED, Workload

FLOAT = np.dtype("float32")

SHARD, COPIES, OPPOSITE = "shard", "copies", "opposite"
"""Groups of ranks along a part of "data", of other parts, and of two ranks with equal stages."""


LOSSES = 16.0
"""Bytes of the sums of losses and samples."""


def links_of(platform: Platform, ranks: int) -> Links:
    """Return the links of a platform for a group of ranks."""
    messages, between, inside = platform.messages, platform.between(ranks), platform.messages.inside
    return Links(
        latency=between.latency,
        bandwidth=between.bandwidth,
        card=between.shared or between.bandwidth,
        local_latency=inside.latency,
        local_bandwidth=inside.bandwidth,
        local_capacity=inside.shared or float("inf"),
        add=1 / messages.add if messages.add else 0.0,
        overhead=messages.call * platform.slowdown(ranks),
        copy=1 / messages.copy if messages.copy else 0.0,
    )


class MessageCosts:
    """Rounds of the operations of a run's ranks.

    Parameters
    ----------
    platform : Platform
    work : Workload
    compression : Compression or None
    """

    def __init__(
        self, platform: Platform, work: Workload, compression: Compression | None = None
    ) -> None:
        self.platform, self.work, self.compression = platform, work, compression
        self.links = links_of(platform, work.ranks)
        self.slowdown = platform.slowdown(work.ranks)
        per_host = platform.cluster.ranks_per_host
        self.axes = {axis: (n, work.stride(axis)) for axis, n in work.axes.items()}
        if work.data > 1:  # ranks with all parts of the state, and those that have the same one
            stride, parts = work.stride("data"), work.parts
            self.axes |= {SHARD: (parts, stride), COPIES: (work.data // parts, parts * stride)}
        schedule, stages = work.pipeline_schedule, work.stages
        if stages > 1 and len(placement(schedule, stages).paths) > 1:  # with the same stages
            self.axes[OPPOSITE] = 2, work.stages // 2 * work.stride(PIPELINE)
        self.groups = {
            axis: Placement.along(*own, per_host, work.ranks) for axis, own in self.axes.items()
        }
        if work.stages > 1 and SHARD in self.groups:  # stages gather at different times
            self.groups[SHARD] = self.groups[SHARD]._replace(sharing=1, together=1)
        self.sum = lru_cache(maxsize=None)(self._sum)

    # -- collectives of layers --------------------------------------------------------------------

    def layer(self, start: Start, samples: float) -> tuple[Round, ...]:
        """Return the rounds of a collective of a layer."""
        nbytes = max(start.nbytes.at(samples), 0.0)
        if start.operation == "allreduce":
            return self.allreduce(start.axis, nbytes)
        group = self.groups[start.axis]
        if start.messages <= 2 < group.ranks:
            return self._halo(start, samples, group)
        return self._to_all(start.messages, nbytes, start.axis)

    def _halo(self, start: Start, samples: float, group: Placement) -> tuple[Round, ...]:
        """Messages to neighbours; those at the end of a host leave it, one in each direction."""
        largest = max(start.largest.at(samples), 0.0)
        terms = Terms(1, 1, 0, start.messages)
        if group.hosts == 1:
            total = max(start.nbytes.at(samples), 0.0)
            return self._rounds(Placed(terms, NONE), total, group)
        leaving = 2.0 if group.per_host == 1 and start.messages == 2 else 1.0
        sent = terms._replace(sent=leaving)
        placed = Placed(NONE, sent, leaving)
        return self._rounds(placed, largest, group, self._stretch("neighbours", start.axis))

    def _to_all(self, messages: int, nbytes: float, axis: str) -> tuple[Round, ...]:
        """A message to each other rank of the group, all at the same time."""
        group = self.groups[axis]
        if not messages:
            return ()
        others, inside = group.ranks - 1, group.per_host - 1
        near, far = inside / others, (others - inside) / others
        local = Terms(1, near, 0, messages * near) if near else NONE
        between = Terms(1, far * group.per_host, 0, messages * far) if far else NONE
        flows = max(group.per_host * messages * far, 1.0)
        placed, further = Placed(local, between, flows), self._stretch("to_all", axis)
        return self._rounds(placed, nbytes, group, further, together=True)

    # -- sums -------------------------------------------------------------------------------------

    def allreduce(self, axis: str, nbytes: float) -> tuple[Round, ...]:
        """Return the rounds of a sum along an axis, by the rule for the hosts of its ranks."""
        group = self.groups[axis]
        if group.ranks == 1 or not nbytes:
            return ()
        hosts = [rank // group.per_host for rank in range(group.ranks)]
        return self.sum(choose(hosts, round(nbytes), FLOAT), nbytes, axis)

    def _sum(self, name: str, nbytes: float, axis: str) -> tuple[Round, ...]:
        """Return the rounds of a sum along an axis by an algorithm; `sum` keeps them."""
        group = self.groups[axis]
        if name == VENDOR:
            return self._library("allreduce", nbytes, axis)
        placed = formulas.allreduce_terms(name, group)
        return self._rounds(placed, nbytes, group, self._stretch(name, axis))

    def _library(self, kind: str, nbytes: float, axis: str) -> tuple[Round, ...]:
        """Return a collective of the MPI library, which needs no calls between its rounds."""
        group, further = self.groups[axis], self._stretch("halving_doubling", axis)
        terms = formulas.library_terms(kind, group.ranks)
        placed = Placed(terms, NONE) if group.hosts == 1 else Placed(NONE, terms)
        local, between = formulas.phases(placed, nbytes, self.links, group, further)
        latency, transfer = local.latency + between.latency, local.transfer + between.transfer
        work, rate = self.links.overhead, self.platform.messages.allreduce
        if kind == "allreduce" and group.hosts == 1 and rate:  # processors add and copy
            transfer, work = 0.0, work + self.slowdown * nbytes * (1 - 1 / group.ranks) / rate
        return (Round(latency, transfer, work),)

    def along_data(self, bucket: BucketOutline) -> tuple[Round, ...]:
        """Return the rounds in which gradients are exchanged along "data" while backward runs."""
        group = self.groups.get("data")
        if group is None or group.ranks == 1 or "data" not in bucket.group:
            return ()
        if self.compression is not None:
            return self._compressed(bucket, group, self.compression)
        if self.work.scheme == "sharded":
            return ()  # exchanged by the update
        if self.waits:
            return self._reduce(bucket)
        if self.work.scheme == "hierarchical":
            return self.sum("leaders", bucket.nbytes, "data")
        return self.allreduce("data", bucket.nbytes)

    def _compressed(
        self, bucket: BucketOutline, group: Placement, compression: Compression
    ) -> tuple[Round, ...]:
        work = Round(0.0, 0.0, compression.work(bucket, group.ranks))
        rounds: list[Round] = [work]
        for nbytes in compression.messages(bucket):
            if compression.adds:
                rounds += self.allreduce("data", nbytes)
            else:
                others = group.ranks - 1
                rounds += self._to_all(others, nbytes * others, "data")
        return tuple(rounds)

    @property
    def waits(self) -> bool:
        """Whether a rank waits for the sum of each bucket before backward continues."""
        return self.work.data > 1 and self.work.scheme in SHARDED[1:]

    def _reduce(self, bucket: BucketOutline) -> tuple[Round, ...]:
        """Return the rounds in which a rank receives its part of a sum, over copies at the end."""
        parts = self.groups[SHARD].ranks
        rounds = self._library("reduce_scatter", bucket.nbytes, SHARD)
        return (*rounds, *self.allreduce(COPIES, bucket.nbytes / parts))

    def update(self, bucket: BucketOutline) -> tuple[Round, ...]:
        """Return the rounds of the update: those of a sharded optimizer."""
        if self.work.data == 1 or self.work.scheme not in SHARDED[:2]:
            return ()
        reduced = () if self.waits else self._reduce(bucket)
        return (*reduced, *self._library("allgather", bucket.nbytes, SHARD))

    def gather(self, bucket: BucketOutline) -> tuple[Round, ...]:
        """Return the rounds in which ranks receive the parameters of which they have a part."""
        others = self.groups[SHARD].ranks - 1
        return self._to_all(others, bucket.nbytes * others / (others + 1), SHARD)

    @property
    def losses(self) -> tuple[Round, ...]:
        """The sum of losses over ranks with other samples, which nothing waits for."""
        return self._library("allreduce", LOSSES, "data") if self.work.data > 1 else ()

    @property
    def meetings(self) -> tuple[Round, ...]:
        """The calls at the end of a step in which all stages of a pipeline wait for each other."""
        call = self._library("broadcast", LOSSES, PIPELINE)
        return call * (1 + (self.work.ranks > self.work.stages))  # after pending sums of groups

    def stage(self, nbytes: Sequence[float]) -> float:
        """Return the time of the messages from one stage of a pipeline to the next, in s."""
        group, total = self.groups["pipeline"], sum(nbytes)
        flows = total / max(nbytes) if total else 1.0  # the longest message is the last to arrive
        terms = Terms(1, 1, 0, flows)
        placed = Placed(terms, NONE) if group.hosts == 1 else Placed(NONE, terms, flows)
        rounds = self._rounds(placed, total, group, self._stretch("to_next", "pipeline"))
        return duration(rounds) - 2 * flows * self.links.overhead  # part of the stages' time

    # -- rounds -----------------------------------------------------------------------------------

    def _stretch(self, pattern: str, axis: str) -> Stretch:
        """Return the factors of the platform's topology on the messages of a pattern."""
        if self.groups[axis].hosts == 1:
            return PLAIN
        return stretch(pattern, self.platform, self.work.ranks, *self.axes[axis])

    def _rounds(
        self,
        placed: Placed,
        nbytes: float,
        group: Placement,
        further: Stretch = PLAIN,
        *,
        together: bool = False,
    ) -> tuple[Round, ...]:
        """Return rounds of equal length: half of the local ones, those between hosts, the rest.

        With `together` the messages inside hosts and between them begin at the same time.
        """
        local, between = formulas.phases(placed, nbytes, self.links, group, further)
        if together:
            latency, transfer = map(max, zip(local[1:3], between[1:3], strict=True))
            return (Round(latency, transfer, local.work + between.work),)
        inside, outside = (
            [Round(*(value / part.rounds for value in part[1:]))] * ceil(part.rounds)
            if part.rounds
            else []
            for part in (local, between)
        )
        half = (len(inside) + 1) // 2
        return (*inside[:half], *outside, *inside[half:])


def duration(rounds: Sequence[Round]) -> float:
    """Return the time of rounds one after the other, in s."""
    return sum(map(sum, rounds))
