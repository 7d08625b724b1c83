"""Silent errors of hardware: gradients that other ranks compute again, compared bit for bit."""

from __future__ import annotations

import logging
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pydtnn.comm.agree import require_equal
from pydtnn.data import Batch
from pydtnn.data.order import Shard
from pydtnn.kernels.cpu._hash import Hash64
from pydtnn.kernels.reference.family import Array
from pydtnn.layers.parameters import Bucket
from pydtnn.training.callback import Callback, Training
from pydtnn.training.capabilities import why_not
from pydtnn.training.equality import hash_all
from pydtnn.training.step import Passes
from pydtnn.training.steps import Eager
from pydtnn.utils.collective import name_ranks
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.machine import cpu_model
from pydtnn.utils.request import Completed, Request
from pydtnn.utils.validate import check_int

_log = logging.getLogger("pydtnn.training")

KINDS = {
    "undecided": "computed different gradients, also in repetition; use a third rank to decide",
    "twice": "computed wrong gradients in this step, and again in repetition",
    "once": "computed wrong gradients in this step, which was repeated and is right now",
}
"""Kinds of errors, the gravest first."""


class SilentError(NamedTuple):
    """A difference between gradients that ranks have computed for the same samples.

    Attributes
    ----------
    step : int
        Updates before the step.
    kind : str
        One of `KINDS`. "undecided" is without a majority of results, as on two ranks.
    ranks : tuple of int
        Those that were wrong; if it is undecided, those that differ.
    """

    step: int
    kind: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"step {self.step + 1}: {name_ranks([*self.ranks])} {KINDS[self.kind]}"


class Verification(Callback):
    """Compute the gradients of each rank's samples on another rank too, every `every` steps.

    In such a step each rank r computes the gradients of rank r + d, whose samples it receives, and
    then its own; d changes from one such step to the next. Hashes of all bytes are compared before
    gradients are summed. If two differ, both ranks and a third one repeat them, and the result of
    the majority is right. After a rank was wrong only once, training continues with the gradients
    of the repetition, and a warning: the parameters, running statistics, residuals and random
    numbers are those of an undisturbed run. Steps have the same bytes as without the check.

    Parameters
    ----------
    every : int
    leave : callable, optional
        Called on ranks that are wrong twice; it must end the rank, and the others continue
        (``--survive``). By default training ends on all ranks.

    Attributes
    ----------
    found : list of SilentError
        Equal on all ranks.
    steps : int
        Steps that have been verified.

    Raises
    ------
    AgreedError
        On all ranks: when training starts, if gradients cannot be compared; in a step, if a rank is
        wrong twice, or it cannot be said which one.

    References
    ----------
    Altenbernd, Wiesner and Kao, "Exploring silent data corruption as a reliability challenge in LLM
    training", CCGrid 2026, arXiv 2604.00726.
    """

    reads_gradients = False

    def __init__(self, every: int = 100, leave: Callable[[], object] | None = None) -> None:
        self.every = check_int("Verification", "every", every, at_least=1)
        self.leave, self.steps = leave, 0
        self.found: list[SilentError] = []
        self._trainer: Any = None

    def on_fit_start(self, trainer: Training, epochs: int, steps: int) -> None:
        """Verify steps from now on. Collective: all ranks call it."""
        if why := why_not("verified steps", trainer.setup):
            raise AgreedError(f"Verification: {why}")
        backend = trainer.model.backend
        facts = {"CPU": cpu_model(), "kernels": (backend.isa, backend.autotuner.kind)}
        advice = "gradients of other kernels differ by rounding, so they cannot be compared"
        require_equal(trainer.comm, "Verification", facts, advice)
        self._trainer = trainer
        self._trainer.use_steps(partial(VerifiedSteps, self))

    def close(self) -> None:
        """Do not verify steps any more."""
        if self._trainer is not None:
            self._trainer.use_steps(Eager)


def leave() -> None:
    """End this rank as a failure would, so that the others continue with ``--survive``."""
    signal.raise_signal(signal.SIGKILL)


class VerifiedSteps(Eager):
    """Steps of which some are verified."""

    def __init__(self, check: Verification, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._check = check

    def _passes(self, kind: Any, batch: Batch, epoch: int, seed: int) -> Passes:
        if (self._setup.optimizer.iterations + 1) % self._check.every == 0:
            kind = partial(VerifiedPasses, self._check)
        return super()._passes(kind, batch, epoch, seed)


class VerifiedPasses(Passes):
    """Passes of a rank whose gradients are given to the exchange when they have been compared."""

    def __init__(self, check: Verification, *args: Any) -> None:
        super().__init__(*args)
        self._check, self._votes = check, [list[Any]() for _ in range(self.exchange.comm.size)]
        self._data = np.frombuffer(pickle.dumps(self.batch, pickle.HIGHEST_PROTOCOL), np.uint8)

    def run(self) -> None:
        """Compute all shards, here and on another rank. Collective."""
        check, others = self._check, self.exchange.comm.size - 1
        step = self.setup.optimizer.iterations
        distances = [1 + (step // check.every + k) % others for k in range(min(2, others))]
        own = self._compare(distances[:1], repeated=False)
        if any(len({value for _, value, _ in computed}) > 1 for computed in self._votes):
            own = self._compare(distances, repeated=True)
            self._judge(step)
        check.steps += 1
        self.totals = own.totals
        for bucket in self.model.buckets:
            self.exchange.bucket_ready(bucket)

    def _compare(self, distances: Sequence[int], *, repeated: bool) -> HashedPasses:
        """Compute the gradients of other ranks, and then those of this one; add all votes."""
        comm = self.exchange.comm
        with self.setup.phase("verification"):
            computed = [self._recompute(distance) for distance in distances]
        own = self._compute(HashedPasses, pickle.loads(self._data.data) if repeated else self.batch)
        results = comm.gather_object([(comm.rank, own.hash.hexdigest()), *computed])
        for rank, values in enumerate(results):
            for distance, (voter, value) in zip((0, *distances), values, strict=True):
                self._votes[(rank + distance) % comm.size].append((voter, value, repeated))
        return own

    def _judge(self, step: int) -> None:
        """Find which ranks were wrong; end training, or these ranks, if they were so twice."""
        comm, check, wrong = self.exchange.comm, self._check, {kind: set[int]() for kind in KINDS}
        for computed in self._votes:
            (right, most), *others = Counter(value for _, value, _ in computed).most_common(2)
            tied = bool(others) and others[0][1] == most
            for voter, value, repeated in computed:
                if tied or value != right:
                    wrong["undecided" if tied else "twice" if repeated else "once"].add(voter)
        kind = next(kind for kind in KINDS if wrong[kind])
        check.found.append(error := SilentError(step, kind, tuple(sorted(wrong[kind]))))
        if kind == "undecided" or (kind == "twice" and not check.leave):
            raise AgreedError(f"Verification: {error}")
        if comm.rank == 0:
            _log.warning("Verification: %s", error)
        if check.leave and kind == "twice":
            if comm.rank in error.ranks:
                check.leave()
            comm.barrier()  # which raises `RankFailure` when they have left

    def _recompute(self, distance: int) -> tuple[int, str]:
        """Return the hash of another rank's gradients with this rank, or without its samples it."""
        comm = self.exchange.comm
        source, to = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        length, sent = comm.gather_object((len(self._data), hash_all([self._data])))[source]
        received = np.empty(length, np.uint8)
        comm.exchange([(self._data, to)], [(received, source)]).wait()
        intact = hash_all([received]) == sent
        batch = pickle.loads(received.data) if intact else self.batch
        value = self._compute(RecomputedPasses, batch).hash.hexdigest()
        return (comm.rank, value) if intact else (source, "not received")

    def _compute(self, kind: type[HashedPasses], batch: Batch) -> HashedPasses:
        passes = kind(self.setup, batch, self.context.epoch, self.context.seed)
        passes.hash, passes.replays = Hash64(), self.replays
        passes.run()
        if self.replays is not None:
            self.replays.end_step()
        return passes


class HashedPasses(Passes):
    """Passes whose gradients are hashed, and not given to the exchange."""

    hash: Hash64

    def take_gradients(self, shard: Shard, bucket: Bucket, grads: Array, *_: Any) -> None:
        """Hash gradients."""
        self.hash.update(grads)
        super().take_gradients(shard, bucket, grads, None)


class RecomputedPasses(HashedPasses):
    """Passes for the samples of another rank, whose losses and statistics are not used."""

    def add_up_losses(self) -> Request:
        """Use no losses."""
        return Completed()

    def fold_statistics(self) -> None:
        """Use no statistics."""
