"""A rank that sleeps delays only the ranks that its scheme names; virtual time makes it exact."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pydtnn.callbacks import Callback, SlowRanks
from pydtnn.comm import Communicator, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.schemes import Gossip, LocalSGD
from pydtnn.tools.perfmodel.virtual import run_virtual
from pydtnn.training import LocalNotFiniteError
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.training.progress import ProgressBar
from pydtnn.training.trainer import Trainer
from pydtnn.utils import clock
from pydtnn.utils.errors import RankError
from pydtnn.utils.imports import import_object
from tests.each import each
from tests.parallel.schemes.course import BATCH as BATCH_OF_COURSE
from tests.parallel.schemes.course import data as data_of_course
from tests.parallel.schemes.course import trainer_of
from tests.small_training import Recorder, small_model
from tests.tools.perfmodel.virtual.costs import UniformCosts, cluster

STEPS, RANKS, BATCH = 10, 6, 2
SLEEP = 0.3
"""Virtual seconds, fifteen times as long as a step."""

Scheme = Callable[[Communicator], GradientExchange]


def data() -> ArrayDataset:
    rng = np.random.default_rng(0)
    samples = STEPS * RANKS * BATCH
    return ArrayDataset(rng.normal(size=(samples, 5, 5, 2)), rng.integers(0, 3, samples))


class Watch(Callback):
    """Notes the time and the messages after each step; one rank sleeps after some steps."""

    def __init__(self, sleeper: int = -1, steps: range = range(STEPS)) -> None:
        self.sleeper, self.steps = sleeper, steps
        self.times: list[float] = []
        self.messages: list[int] = []

    def on_step_end(self, trainer: Any) -> None:
        comm = trainer.comm
        self.times.append(clock.now())
        self.messages.append(comm.traffic.messages)
        if comm.rank == self.sleeper and trainer.step - 1 in self.steps:
            clock.virtual().engine.spend(comm.rank, SLEEP)


def run(scheme: Scheme, sleeper: int, steps: range = range(STEPS)) -> list[Watch]:
    def rank(comm: Communicator) -> Watch:
        watch = Watch(sleeper, steps)
        trainer = Trainer(
            small_model(),
            "sgd",
            exchange=scheme(comm),
            callbacks=[watch, SlowRanks()],
            progress="plain",
        )
        trainer.fit(data(), batch_size=BATCH, loader_threads=0)
        assert len(trainer.losses) == STEPS
        return watch

    ranks = run_virtual(rank, network=cluster("a" * RANKS), costs=UniformCosts())
    return list(ranks.results)


@each(
    "scheme",
    [
        lambda comm: LocalSGD(comm, period=1000),
        import_object("examples/asynchronous_scheme.py:AsynchronousGossip", "scheme"),
    ],
)
def test_a_rank_beside_one_that_sleeps_takes_its_own_time_without_messages(scheme):
    usual, beside = (run(scheme, sleeper)[0] for sleeper in (-1, RANKS - 1))
    alone, found = (watch.times[-2] - watch.times[3] for watch in (usual, beside))
    assert 0 < found <= 1.2 * alone
    reduced = run(AllReduce, RANKS - 1)[0].times  # as slow as its slowest rank
    assert reduced[-1] - reduced[0] > (STEPS - 1) * SLEEP
    if not isinstance(scheme, type):  # the asynchronous one sends in each step
        assert len({*beside.messages[3:-1]}) == 1
    # the last step of an epoch sums the losses, for which all ranks wait
    assert beside.times[-1] - beside.times[-2] > SLEEP


def test_local_sgd_waits_when_it_averages_and_sums_the_losses_then():
    watch = run(lambda comm: LocalSGD(comm, period=5), RANKS - 1)[0]
    waited = np.diff(watch.times, prepend=0) > SLEEP
    assert [*np.flatnonzero(waited)] == [4, 9]
    sent = np.diff(watch.messages)
    assert [*np.flatnonzero(sent) + 1] == [4, 9]


def late_after(scheme: Scheme, sleeper: int, slept: int) -> np.ndarray:
    """Which ranks are late in which steps, if a rank has slept after one of them."""
    usual, found = (
        np.array([watch.times for watch in run(scheme, one, range(slept, slept + 1))])
        for one in (-1, sleeper)
    )
    return found - usual > SLEEP / 2


def test_gossip_delays_neighbours_and_their_neighbours_one_step_later():
    sleeper, slept = 3, 2
    late = late_after(Gossip, sleeper, slept)
    distance = np.minimum(np.arange(RANKS) - sleeper, sleeper - np.arange(RANKS)) % RANKS
    distance = np.minimum(distance, RANKS - distance)
    for step in range(STEPS - 1):  # the last one sums the losses
        expected = (distance <= step - slept) & (step > slept)
        np.testing.assert_array_equal(late[:, step], expected, err_msg=f"step {step}")


# -- what a user sees


def fit_uneven(exchange: GradientExchange, *callbacks: Callback, bad: bool = False) -> Trainer:
    """Two epochs of five steps, whose last batch has one sample."""
    train = data_of_course()
    if bad:
        train.x[7] = np.nan
    trainer = trainer_of(exchange, SGD(0.1), callbacks=callbacks, progress=False)
    trainer.fit(train, epochs=2, global_batch_size=BATCH_OF_COURSE, loader_threads=0)
    return trainer


@pytest.mark.threads(1, 3)
@pytest.mark.mpi(2, 3)
@each("scheme", [Gossip, GradientExchange, lambda comm: LocalSGD(comm, period=3)])
def test_losses_and_history_are_those_of_all_ranks_at_the_end_of_an_epoch(comm, scheme):
    """They are equal on all ranks, and have the bytes of losses that every step sums."""
    own: list[int] = []
    trainer = fit_uneven(scheme(comm), Recorder(lambda trainer: own.append(trainer.own_steps)))
    summing = scheme(comm)
    summing.sums_losses = True
    expected = fit_uneven(summing)
    assert trainer.losses == expected.losses
    assert comm.gather_object(trainer.losses) == [trainer.losses] * comm.size
    assert trainer.history == expected.history
    meets = isinstance(trainer.exchange, LocalSGD)
    assert own == ([1, 2, 0, 1, 0, 0, 1, 2, 0, 0] if meets else [1, 2, 3, 4, 0] * 2)


@pytest.mark.threads(2)
def test_a_checkpoint_within_an_epoch_has_the_sums_of_all_ranks(comm, tmp_path):
    def save(trainer: Trainer) -> None:
        if trainer.step == 3 and trainer.epoch == 0:
            save_checkpoint(tmp_path, trainer)

    whole = fit_uneven(Gossip(comm), Recorder(save))
    trainer = trainer_of(Gossip(comm), SGD(0.1), progress=False)
    load_checkpoint(tmp_path, trainer)
    assert trainer.totals.count == 3 * BATCH_OF_COURSE
    trainer.fit(data_of_course(), epochs=2, global_batch_size=BATCH_OF_COURSE, loader_threads=0)
    assert trainer.history == whole.history
    assert trainer.losses == whole.losses[3:]


@pytest.mark.threads(2)
def test_the_progress_line_says_which_losses_are_of_rank_0_only(comm):
    file = io.StringIO()
    trainer = fit_uneven(LocalSGD(comm, period=2), ProgressBar(file, interval=0.0, style="plain"))
    if comm.rank == 0:
        lines = file.getvalue().splitlines()
        within = [line for line in lines if "left" in line]
        assert ["last 1 steps of rank 0 only" in line for line in within[:5]] == [
            *(True, False, True, False, False)
        ]
        end = next(line for line in lines if "left" not in line)
        assert f"loss {trainer.history[0]['loss']:.4f}" in end


def test_a_loss_that_is_not_finite_ends_all_ranks_by_the_error_of_its_rank():
    def rank(comm: Communicator) -> None:
        fit_uneven(Gossip(comm), bad=True)

    told = (
        r"^rank \d: the loss of this rank's samples is not finite at epoch 1, step \d: first in "
        r"the input of sample \d+, column \d+; clean the data$"
    )
    with pytest.raises(RankError, match=told) as raised:
        run_threads(3, rank)
    assert isinstance(raised.value.__cause__, LocalNotFiniteError)
