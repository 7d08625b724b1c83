"""The messages of a training step as rounds on the links of a platform."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from functools import lru_cache

import numpy as np

from pydtnn.comm.schedules.executor import pieces
from pydtnn.comm.schedules.rule import MAX_VENDOR_BYTES, VENDOR, choose
from pydtnn.layers.collectives import PIPELINE
from pydtnn.model.pipeline.schedules import placement
from pydtnn.tools.perfmodel.compression import Compression
from pydtnn.tools.perfmodel.outline import BucketOutline, Start
from pydtnn.tools.perfmodel.overlap import Round
from pydtnn.tools.perfmodel.patterns import (
    PIECE,
    AxisGroups,
    Processing,
    Wires,
    library_terms,
    rounds_of,
    rows_of,
)
from pydtnn.tools.perfmodel.pipelines import StageMessage
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.training.workload import SHARDED, Workload

FLOAT = np.dtype("float32")

SHARD, COPIES, OPPOSITE = "shard", "copies", "opposite"
"""Groups of ranks along a part of "data", of other parts, and of two ranks with equal stages."""


LOSSES = 16.0
"""Bytes of the sums of losses and samples."""


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
        self.slowdown, messages = platform.slowdown(work.ranks), platform.messages
        add, copied = (1 / rate if rate else 0.0 for rate in (messages.add, messages.copy))
        self.processing = Processing(messages.call * self.slowdown, add, copied)
        self.wires = Wires.of(platform, work.ranks)
        per_host = platform.cluster.ranks_per_host
        axes = {axis: (n, work.stride(axis)) for axis, n in work.axes.items()}
        if work.data > 1:  # ranks with all parts of the state, and those that have the same one
            stride, parts = work.stride("data"), work.parts
            axes |= {SHARD: (parts, stride), COPIES: (work.data // parts, parts * stride)}
        schedule, stages = work.pipeline_schedule, work.stages
        if stages > 1 and len(placement(schedule, stages).paths) > 1:  # with the same stages
            axes[OPPOSITE] = 2, work.stages // 2 * work.stride(PIPELINE)
        self.groups = {axis: AxisGroups(*own, per_host, work.ranks) for axis, own in axes.items()}

    def at(self, axis: str, place: int) -> MessageCosts:
        """Return those of ranks at a place along an axis: their groups do not wait for others."""
        along = {"data": ("data", SHARD, COPIES), PIPELINE: (PIPELINE, OPPOSITE)}[axis]
        stage, own = (place, self.work.stride(axis), self.work.axes[axis]), copy(self)
        own.groups = {
            name: groups if name in along else groups._replace(stage=stage)
            for name, groups in self.groups.items()
        }
        return own

    def _rounds(
        self, pattern: str, axis: str, nbytes: float, parts: float = 1.0
    ) -> tuple[Round, ...]:
        """Return the rounds of a pattern along an axis, of an array of so many bytes."""
        given = pattern, self.groups[axis], self.wires, self.processing, nbytes, parts
        return rounds_of(*given) if nbytes else ()

    # -- collectives of layers --------------------------------------------------------------------

    def layer(self, start: Start, samples: float) -> tuple[Round, ...]:
        """Return the rounds of a collective of a layer."""
        nbytes = max(start.nbytes.at(samples), 0.0)
        if start.operation == "allreduce":
            return self.allreduce(start.axis, nbytes)
        if start.operation == "neighbours":  # up to two, to which messages are sent together
            to_each = max(start.largest.at(samples), nbytes / min(max(start.messages, 1), 2))
            return self._rounds("neighbours", start.axis, to_each, start.messages / 2)
        return self._to_all(nbytes, start.axis, start.messages)

    def _to_all(self, nbytes: float, axis: str, messages: int = 0) -> tuple[Round, ...]:
        """Messages to all other ranks of the group at the same time, of `nbytes` together."""
        ranks, others = self.groups[axis].ranks, max(self.groups[axis].ranks - 1, 1)
        parts = (messages or others) / others
        return self._rounds("to_all", axis, nbytes * ranks / others, parts)

    # -- sums -------------------------------------------------------------------------------------

    def allreduce(self, axis: str, nbytes: float) -> tuple[Round, ...]:
        """Return the rounds of a sum along an axis, by the rule for the hosts of its ranks."""
        groups = self.groups[axis]
        if groups.ranks == 1 or not nbytes:
            return ()
        return self.sum(_chosen(groups, min(round(nbytes), MAX_VENDOR_BYTES + 1)), nbytes, axis)

    def sum(self, name: str, nbytes: float, axis: str) -> tuple[Round, ...]:
        """Return the rounds of a sum along an axis by an algorithm."""
        if name == VENDOR:
            return self._library("allreduce", nbytes, axis)
        groups, chunks = self.groups[axis], pieces(round(nbytes))
        apart = (1.0, chunks) if groups.hosts > 1 else (chunks, 1)  # or one after the other
        return rounds_of(name, groups, self.wires, self.processing, nbytes, *apart)

    def _library(self, kind: str, nbytes: float, axis: str) -> tuple[Round, ...]:
        """Return a collective of the MPI library, which needs no calls between its rounds."""
        groups, rate = self.groups[axis], self.platform.messages.allreduce
        if groups.ranks == 1:
            return ()
        rounds, sent = library_terms(kind, groups.ranks)
        near = ("local_latency", "local", "memory") if groups.hosts > 1 else ()
        left_out = dict.fromkeys(near, 0.0)  # messages inside hosts are not the slowest
        rows = [row._replace(**left_out) for row in rows_of("around", groups, self.wires)]
        latency, work = max(row.link(0.0)[0] for row in rows), 0.0
        _, transfer, spare = rows[0].link(nbytes * sent)
        if kind == "allreduce" and groups.hosts == 1 and rate:  # processors add and copy
            transfer, spare, work = 0.0, 0.0, self.slowdown * nbytes * (1 - 1 / groups.ranks) / rate
        calls = self.processing.call
        return (Round(rounds * latency, transfer, work, spare, calls=calls),)

    def along_data(self, bucket: BucketOutline) -> tuple[Round, ...]:
        """Return the rounds in which gradients are exchanged along "data" while backward runs."""
        group = self.groups.get("data")
        if group is None or group.ranks == 1 or "data" not in bucket.group:
            return ()
        if self.compression is not None:
            return self._compressed(bucket, group.ranks, self.compression)
        if self.work.scheme == "sharded":
            return ()  # exchanged by the update
        if self.waits:
            return self._reduce(bucket.nbytes)
        return self.allreduce("data", bucket.nbytes)

    def _compressed(
        self, bucket: BucketOutline, ranks: int, compression: Compression
    ) -> tuple[Round, ...]:
        rounds = [Round(0.0, 0.0, compression.work(bucket, ranks))]
        for nbytes in compression.messages(bucket):
            if compression.adds:
                rounds += self.allreduce("data", nbytes)
            else:
                rounds += self._to_all(nbytes * (ranks - 1), "data")
        return tuple(rounds)

    @property
    def waits(self) -> bool:
        """Whether a rank waits for the sum of each bucket before backward continues."""
        return self.work.data > 1 and self.work.scheme in SHARDED[1:]

    def _reduce(self, nbytes: float) -> tuple[Round, ...]:
        """Return the rounds in which a rank receives its part of a sum, over copies at the end."""
        parts = self.groups[SHARD].ranks
        rounds = self._library("reduce_scatter", nbytes, SHARD)
        return (*rounds, *self.allreduce(COPIES, nbytes / parts))

    def update(self, nbytes: float) -> tuple[Round, ...]:
        """Return the rounds of the update of a bucket: those of a sharded optimizer."""
        if self.work.data == 1 or self.work.scheme not in SHARDED[:2]:
            return ()
        reduced = () if self.waits else self._reduce(nbytes)
        return (*reduced, *self._library("allgather", nbytes, SHARD))

    def gather(self, bucket: BucketOutline) -> tuple[Round, ...]:
        """Return the rounds in which ranks receive the parameters of which they have a part."""
        others = self.groups[SHARD].ranks - 1
        return self._to_all(bucket.nbytes * others / (others + 1), SHARD)

    @property
    def losses(self) -> tuple[Round, ...]:
        """The sum of losses over ranks with other samples, which nothing waits for."""
        return self._library("allreduce", LOSSES, "data") if self.work.data > 1 else ()

    @property
    def meetings(self) -> tuple[Round, ...]:
        """The calls at the end of a step in which all stages of a pipeline wait for each other."""
        call = self._library("broadcast", LOSSES, PIPELINE)
        return call * (1 + (self.work.ranks > self.work.stages))  # after pending sums of groups

    def replicas(self) -> dict[int, np.ndarray]:
        """Return the ranks of copies of the network that are spread over hosts in different ways.

        The keys are their places along "data", the smallest of each kind.
        """
        work, per_host = self.work, self.platform.cluster.ranks_per_host
        ranks = np.arange(work.ranks)
        places = ranks // work.stride("data") % work.data if work.data > 1 else 0 * ranks
        every = np.argsort(places, kind="stable").reshape(work.data, -1)
        moves = np.diff(every // per_host, axis=1) != 0
        return {int(i): every[i] for i in sorted(np.unique(moves, axis=0, return_index=True)[1])}

    def links(self, rank: int) -> tuple[Hashable, ...]:
        """Return the links of the sums of a rank along "data" that those of others use, too."""
        groups = self.groups.get("data")
        host, place = divmod(rank, self.platform.cluster.ranks_per_host)
        if groups is None or groups.hosts == 1:
            return (("inside", host),) if self.wires.inside.shared else (("of", rank),)
        return ("from", rail := place % self.wires.rails, host), ("to", rail, host)

    def route(
        self, sender: int, receiver: int, ranks: Sequence[int], nbytes: Sequence[float]
    ) -> StageMessage:
        """Return what messages of so many bytes between two of the ranks of a pipeline need."""
        groups = self.groups[PIPELINE]._replace(pair=tuple(sorted((sender, receiver))))
        (row,) = rows_of("to_next", groups, self.wires)
        here, there = (ranks[one] // groups.per_host for one in (sender, receiver))
        posting = max(len(nbytes) - 1, 0) * self.processing.call
        if here == there:
            inside = (("inside", here),) if row.memory else ()
            arrays = tuple((n / self.wires.inside.bandwidth, row.memory * n) for n in nbytes)
            return StageMessage(row.local_latency, arrays, inside, posting=posting)
        rail = ranks[sender] % groups.per_host % self.wires.rails
        links: tuple[Hashable, ...] = ("from", rail, here), ("to", rail, there)
        between = self.platform.messages.between
        if row.shared > 1.001 / (between.shared or between.bandwidth):
            links = (("switches", here, there),)  # a link between switches is narrower than cards
        copied = self.processing.copy * sum(nbytes)
        piece = self.processing.copy * sum(min(n, PIECE) for n in nbytes)
        arrays = tuple((row.alone * n, row.shared * n) for n in nbytes)
        return StageMessage(row.latency, arrays, links, copied, piece, posting)


@lru_cache(maxsize=4096)
def _chosen(groups: AxisGroups, nbytes: int) -> str:
    return choose(groups.places, nbytes, FLOAT)


def duration(rounds: Sequence[Round]) -> float:
    """Return the time of rounds one after the other, in s."""
    return sum(one.seconds for one in rounds)
