"""One rank of a short training run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.comm.wrapper import Delayed
from pydtnn.data import ArrayDataset, Loader
from pydtnn.layers import Linear, Sequential, Sigmoid
from pydtnn.layers.parameters import Bucket, Entry
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.testing.scheme_watch import Injected, Ledger, Watched
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.nonfinite import NotFiniteError
from pydtnn.training.trainer import Trainer

SAMPLES = 23
BATCH = 11
"""Global batch size: its parts are uneven, and the last batch of an epoch is a single sample."""

STEPS = 18
MIDDLE = 10
"""Step at which a run is saved and resumed: within an epoch."""

BAD_STEP = 4
"""Step with a loss of NaN if a step is to be abandoned."""

FAILING_STEP = 2
"""Step in which a method of the scheme raises if it is to fail."""


@dataclass(frozen=True)
class Plan:
    """Special conditions of one run.

    Attributes
    ----------
    bucket_bytes : int
        1 gives one bucket per parameter.
    delays : int or None
        Seed of random delays.
    bad_step : bool
        Whether the loss of `BAD_STEP` is NaN on the last rank.
    save, resume : path or None
        Folder to which the state after `MIDDLE` is saved, or from which the run resumes.
    fails : str or int or None
        Failure on the last rank: a method of the scheme, in `FAILING_STEP`, or the call of its
        communicator with this number, counted from the first step.
    """

    bucket_bytes: int = 1
    delays: int | None = None
    bad_step: bool = False
    save: Path | None = None
    resume: Path | None = None
    fails: str | int | None = None


@dataclass
class Course:
    """Results of a run on one rank.

    Attributes
    ----------
    equal : bool
        Whether the scheme declares that all ranks have the same parameters between steps.
    names : list of str
        For each element of the parameters, the name of its parameter.
    buckets, gradient_bytes : int
        Number of buckets, and bytes of all gradients.
    values : list of ndarray
        All parameters after each step.
    final : ndarray
        All parameters at the end, averaged if they differ between ranks.
    first_loss, last_loss : float
        Loss of all samples, before the first step and after the last.
    calls : list of str
        Calls of the rank in all steps.
    messages, bytes : int
        Traffic of all steps; bytes in B.
    waited, wall : float
        Time that all steps spent in communication, and their whole time, in s.
    pending, unmatched : list of str
        Operations that were not complete on the rank at the end of the run, and those of them
        without a counterpart on other ranks.
    """

    equal: bool
    names: list[str]
    buckets: int
    gradient_bytes: int
    values: list[np.ndarray] = field(default_factory=list)
    final: np.ndarray = field(default_factory=lambda: np.empty(0))
    first_loss: float = 0.0
    last_loss: float = 0.0
    calls: list[str] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    waited: float = 0.0
    wall: float = 0.0
    pending: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)


def problem(seed: int) -> ArrayDataset:
    """Create a classification task that a small network learns within a few steps."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SAMPLES, 5))
    return ArrayDataset(x, (x @ rng.normal(size=(5, 3))).argmax(axis=1))


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
