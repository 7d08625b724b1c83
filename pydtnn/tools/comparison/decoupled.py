"""Decoupled DiLoCo: outer steps that wait for a quorum of the ranks only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pydtnn.layers.parameters import Bucket
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.option import option
from pydtnn.parallel.schemes.diloco import StreamingDiLoCo
from pydtnn.utils import clock
from pydtnn.utils.request import Chain, Completed, Request, Together


class DecoupledDiLoCo(StreamingDiLoCo):
    """Streaming DiLoCo whose outer steps take what a quorum of the ranks has sent.

    Every `period` steps, each bucket at steps of its own, a rank m sends its parameters w_m and the
    number of samples n_m of `fit` so far to rank 0, and trains on. `delay` steps later, rank 0
    waits until it has new parameters of `quorum` ranks, with its own, and from then on for those of
    the others, but not longer than `grace` times the time since it has sent its own. With the ranks
    M that it has then, ``d = sum_M a_m (c - w_m) / sum_M a_m``, ``a_m = n_m n_m``; the outer step
    of `DiLoCo` follows, and c is sent to these ranks. A rank whose parameters come later is sent c
    at once, and its parameters belong to the next outer step. When c has arrived, ``w_m <- mixing
    w_m + (1 - mixing) c`` after the next step of the rank.

    So rank 0 waits for the quorum and the window of grace, and no other rank waits: a slow or lost
    rank delays the others only at the end of an epoch, where losses are summed. Late ranks are
    answered in the order of outer steps, so that one that is lost keeps answers from others that
    are late. Rank 0 is the syncer and a learner. Results depend on times, on virtual ranks on
    virtual ones, and what is late, or not mixed in yet, is not in checkpoints. Without `quorum` all
    ranks wait for all, and results do not depend on times: this is Streaming DiLoCo with weights.

    Quorum, window, weights and syncer are those of the paper as we know it from its abstract and
    from summaries, not from its text. There the weights are tokens times tokens per step since the
    last outer step; here all ranks have equal numbers of steps. How the window adapts, and how
    learners take what they receive, is not certain; the latter is as in Streaming DiLoCo here.

    Parameters
    ----------
    comm : Communicator
    period, rate, momentum, delay, mixing
        See `StreamingDiLoCo`.
    quorum : int, optional
        Number of ranks, by default all.
    grace : float
        Window as a part of the time that the quorum has taken.

    References
    ----------
    Douillard et al., "Decoupled DiLoCo for resilient distributed pre-training", 2026, arXiv
    2604.21428.
    """

    quorum: int | None = option(int, at_least=1)
    grace: float = option(0.5, at_least=0)

    def check(self, optimizer: Optimizer) -> None:
        """Raise ValueError if there are fewer ranks than the quorum."""
        if (self.quorum or 1) > (ranks := self.comm.size):
            words = f"at most {ranks}, the number of ranks, got {self.quorum}"
            raise ValueError(f"DecoupledDiLoCo: quorum must be {words}")

    def start(self, buckets: tuple[Bucket, ...]) -> None:
        self.reports: list[dict[int, np.ndarray]] = [{} for _ in buckets]
        self.arrived: list[Bucket] = []
        super().start(buckets)

    def update(self, optimizer: Optimizer) -> None:
        super().update(optimizer)
        for bucket in self.arrived:
            bucket.values[...] += (1 - self.mixing) * (self.outer[bucket.index] - bucket.values)
        self.arrived.clear()

    def send(self, bucket: Bucket) -> None:
        """Start to send this rank's parameters, and to receive those of the outer step."""
        own = np.append(bucket.values, bucket.values.dtype.type(self.samples))
        steps = (self.report if self.comm.rank else self.serve)(bucket, own)
        self.in_flight.put(bucket, Chain(steps, by_test=self.comm.rank > 0))

    def merge(self, bucket: Bucket, lr: float) -> None:
        """Wait for the outer step of a bucket on ranks that are to."""
        if self.comm.rank == 0 or self.quorum is None:
            if bucket in self.in_flight:
                self.in_flight.pop(bucket).wait()
            self.arrived.append(bucket)

    def report(self, bucket: Bucket, own: np.ndarray) -> Iterator[Request]:
        """Send parameters to rank 0, and receive the outer ones."""
        received, index = np.empty_like(bucket.values), bucket.index
        yield Together([self.comm.isend(own, 0, index), self.comm.irecv(received, 0, index)])
        self.outer[index][...] = received
        self.arrived += [bucket] * (self.quorum is not None)

    def serve(self, bucket: Bucket, own: np.ndarray) -> Iterator[Request]:
        """Wait for the quorum, take the outer step, and answer all ranks, late ones later."""
        index, reports, outer = bucket.index, self.reports[bucket.index], self.outer[bucket.index]
        reports[0], begin, needed = own, clock.now(), self.quorum or self.comm.size
        arrays = {rank: np.empty_like(own) for rank in range(1, self.comm.size)}
        late = {rank: self.comm.irecv(array, rank, index) for rank, array in arrays.items()}

        def answer(rank: int) -> Iterator[Request]:
            if rank in late:
                yield late[rank]
                reports[rank] = arrays[rank]
            yield self.comm.isend(outer.copy(), rank, index)

        yield Completed()  # and go on when rank 0 waits
        end, wait = 0.0, 1 + self.grace  # of the window
        while late and (not end or clock.now() < end):
            for rank in [rank for rank, request in late.items() if request.test()]:
                reports[rank], _ = arrays[rank], late.pop(rank)
            end = (end or begin + wait * (clock.now() - begin)) if len(reports) >= needed else 0.0
        values = np.array([reports.pop(rank) for rank in sorted(reports)])
        mean = np.average(values[:, :-1], axis=0, weights=values[:, -1] ** 2 + 1e-30)
        self.outer_step(outer, self.velocity[index], outer - mean, 0.0)
        for rank in arrays:
            self.in_flight.add(Chain(answer(rank)))
