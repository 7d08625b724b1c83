"""One rank of a short training run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.delayed import Delayed
from pydtnn.data import ArrayDataset, Loader
from pydtnn.layers import Linear, Sequential, Sigmoid
from pydtnn.layers.parameters import Bucket, Entry
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.testing.scheme_course import BAD_STEP, BATCH, FAILING_STEP, MIDDLE, STEPS, Course, Plan
from pydtnn.testing.scheme_watch import Injected, Ledger, Watched
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.nonfinite import NotFiniteError
from pydtnn.training.trainer import Trainer

LONGEST_DELAY = 2e-4
"""In s: long enough for several calls of other ranks."""

Scheme = Callable[[Communicator], GradientExchange]


class Rank:
    """A rank's trainer and its results.

    Parameters
    ----------
    comm : Communicator
    ledger : Ledger
        Records the calls of the scheme.
    scheme : callable
        Creates the exchange from a communicator.
    optimizer : callable
        Creates the rule.
    data : ArrayDataset
    plan : Plan
    """

    def __init__(
        self,
        comm: Communicator,
        ledger: Ledger,
        scheme: Scheme,
        optimizer: Callable[[], Optimizer],
        data: ArrayDataset,
        plan: Plan,
    ) -> None:
        self.ledger, self.plan, self.data = ledger, plan, data
        if plan.delays is not None:
            comm, ledger.filler = Delayed(comm, plan.delays, LONGEST_DELAY), 63
        self.exchange = scheme(Watched(comm, ledger))
        self.model = Model(
            Sequential(Linear(6, name="first"), Sigmoid(), Linear(3, name="second")),
            data.input_shape,
            backend="numpy",
            dtype="float64",
            seed=comm.rank,  # initial parameters differ if the scheme does not broadcast
            bucket_bytes=plan.bucket_bytes,
        )
        self.trainer = Trainer(self.model, optimizer(), exchange=self.exchange, metrics=())
        self.loader = Loader(
            data,
            global_batch_size=BATCH,
            rank=comm.rank,
            size=comm.size,
            shards=self.exchange.sums.shards,
            dtype="float64",
            prefetch=0,
        )
        entries = [entry for _, entry in self._entries()]
        self.course = Course(
            equal=self.exchange.equal,
            names=[e.name for e in entries for _ in range(e.slice.start, e.slice.stop)],
            buckets=len(self.model.buckets),
            gradient_bytes=sum(bucket.grads.nbytes for bucket in self.model.buckets),
        )

    @property
    def is_last(self) -> bool:
        """Whether special conditions apply to this rank."""
        return self.trainer.comm.rank == self.trainer.comm.size - 1

    def run(self) -> Course:
        """Train from the beginning, or from the checkpoint, to the end."""
        course, trainer, plan = self.course, self.trainer, self.plan
        if plan.resume:
            load_checkpoint(plan.resume, trainer)
        else:
            self.exchange.start(self.model.buckets)
        course.first_loss = trainer.evaluate(self.data)["loss"]
        if self.is_last and isinstance(plan.fails, int):
            self.ledger.fails_at = len(self.ledger.calls) + plan.fails
        for step in range(MIDDLE if plan.resume else 0, STEPS):
            if step == MIDDLE and plan.save:
                save_checkpoint(plan.save, trainer)
            if step == FAILING_STEP and self.is_last and isinstance(plan.fails, str):
                setattr(self.exchange, plan.fails, _fail)
            self._step(step)
            course.values.append(self._values())
        course.last_loss = trainer.evaluate(self.data)["loss"]
        if not self.exchange.equal:
            self.exchange.average_parameters()
        course.final = self._values()
        trainer.comm.barrier()  # all matching operations are complete
        course.pending = [request.what for request in self.ledger.pending]
        if plan.delays is None:  # a delayed request is never complete at the first test
            course.unmatched = [r.what for r in self.ledger.pending if not r.inner.test()]
        return course

    def _step(self, step: int) -> None:
        """Run one step and record its cost."""
        epoch, index = divmod(step, len(self.loader))
        batch = next(self.loader.epoch(epoch, start=index))
        is_bad = self.plan.bad_step and step == BAD_STEP
        if is_bad and self.is_last:
            batch = replace(batch, x=batch.x * np.nan)
        course, traffic, before = self.course, self.exchange.comm.traffic, self._values()
        messages, sent, waited = traffic.messages, traffic.bytes, traffic.seconds
        calls, start = len(self.ledger.calls), time.perf_counter()
        try:
            self.trainer.train_step(batch, epoch)
        except NotFiniteError:
            if not is_bad:
                raise
            self._check_abandoned(before)
        course.wall += time.perf_counter() - start
        course.messages += traffic.messages - messages
        course.bytes += traffic.bytes - sent
        course.waited += traffic.seconds - waited
        course.calls += self.ledger.calls[calls:]

    def _check_abandoned(self, before: np.ndarray) -> None:
        """No request is pending after an abandoned step, and no parameter has changed."""
        for request in self.ledger.pending:
            raise ValueError(f"abandon() leaves {request.what} incomplete; wait for every request")
        if not np.array_equal(before, self._values()):
            raise ValueError("abandon() changed the parameters; only update() may change them")

    def _values(self) -> np.ndarray:
        """Copy all parameters, without the padding between them."""
        return np.concatenate([bucket.values[entry.slice] for bucket, entry in self._entries()])

    def _entries(self) -> list[tuple[Bucket, Entry]]:
        """List all parameters in an order that does not depend on the buckets."""
        entries = [(b, entry) for b in self.model.buckets for entry in b.parameters]
        return sorted(entries, key=lambda one: one[1].name)


def _fail(*args: Any) -> None:
    raise Injected("injected failure")
