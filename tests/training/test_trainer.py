"""Methods of a trainer that all ranks call, where they do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pydtnn
from pydtnn import ArrayDataset, Model, Trainer, load_dataset
from pydtnn.callbacks import Callback
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.layers import BatchNorm, Flatten, Linear, ReLU, Sequential
from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import AllReduce, GradientExchange, LocalSGD
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint
from pydtnn.utils import clock
from pydtnn.utils.errors import AgreedError, RankError
from tests.checked import Checked
from tests.each import each
from tests.small_training import Ticks, checksums, small_data, small_fit, small_trainer, spend

DATA, VALIDATION = small_data()


def within(trainer: Trainer, folder: Path) -> None:
    with trainer.averaged():
        pass


Method = Callable[[Trainer, Path], object]

METHODS: dict[str, Method] = {
    "Trainer.fit": lambda trainer, folder: small_fit(trainer, 1),
    "Trainer.evaluate": lambda trainer, folder: trainer.evaluate(VALIDATION),
    "Trainer.save": lambda trainer, folder: trainer.save(folder / "model"),
    "Trainer.averaged": within,
    "Trainer.synchronise": lambda trainer, folder: trainer.synchronise(),
    "Trainer.compare_ranks": lambda trainer, folder: trainer.compare_ranks(),
    "save_checkpoint": lambda trainer, folder: save_checkpoint(folder, trainer),
    "load_checkpoint": lambda trainer, folder: load_checkpoint(folder, trainer),
}


def run(ranks: int, folder: Path, first: list[str], others: list[str]) -> None:
    """Call methods on the first rank, and other ones on the others."""

    def work(comm: Communicator) -> None:
        trainer = small_trainer(comm)
        for name in others if comm.rank else first:
            METHODS[name](trainer, folder)

    run_threads(ranks, work)


@each("name", METHODS)
def test_a_method_that_one_rank_calls_is_named(name, tmp_path):
    with pytest.raises(RuntimeError, match=rf"rank 0 in gather_object in {name} \(without rank 1"):
        run(2, tmp_path, [name], [])


@each(("one", "other"), [*zip(METHODS, [*METHODS][1:], strict=False)])
def test_methods_in_other_orders_or_twice_are_named(one, other, tmp_path):
    words = f"rank 0 calls gather_object in {one} where rank 1 calls gather_object in {other}; all"
    for first, others in (([one, other], [other, one]), ([one, one], [one, other])):
        with pytest.raises(RankError, match=f"{words} ranks must make the same calls in the same"):
            run(3, tmp_path, first, others)


@pytest.mark.threads(2)
@pytest.mark.mpi(2)
@each("checked", [False, True])
def test_methods_that_meet_are_named_over_mpi_and_where_calls_are_compared(comm, checked):
    trainer = small_trainer(Checked(comm) if checked else comm)
    with pytest.raises((AgreedError, ValueError)) as caught:
        trainer.evaluate(VALIDATION) if comm.rank else trainer.save("nowhere")
    assert "in Trainer.evaluate" in str(caught.value)
    assert "in Trainer.save" in str(caught.value)
    if not checked:
        assert trainer.evaluate(VALIDATION)["loss"] > 0  # the error is one of all ranks


class OnRank0(Callback):
    """Calls a function on rank 0 only, as users forget that all ranks must call it."""

    def __init__(self, event: str, call: Callable[[Any], object]) -> None:
        self.event, self.call = event, call

    def on_epoch_end(self, trainer: Any) -> None:
        if trainer.comm.rank == 0 and self.event == "epoch":
            self.call(trainer)

    def on_step_end(self, trainer: Any) -> None:
        if trainer.comm.rank == 0 and self.event == "step":
            self.call(trainer)


CALLS: dict[str, Callable[[Any], object]] = {
    "Trainer.evaluate": lambda trainer: trainer.evaluate(VALIDATION),
    "Trainer.save": lambda trainer: trainer.save("nowhere"),
    "callback OnRank0": lambda trainer: trainer.comm.barrier(),
}


@each("event", ["epoch", "step"])
@each("name", CALLS)
def test_a_method_that_a_callback_calls_on_one_rank_is_named(name, event):
    def work(comm: Communicator) -> None:
        small_fit(small_trainer(comm, OnRank0(event, CALLS[name])), 2)

    with pytest.raises(RankError, match=f"rank 0 calls (gather_object|barrier) in {name} where"):
        run_threads(2, work)


def stop(trainer: Any) -> None:
    trainer.stop = True


@pytest.mark.threads(3)
@each("event", ["epoch", "step"])
def test_any_rank_may_stop_all_after_the_epoch(comm, event):
    trainer = small_trainer(comm, OnRank0(event, stop))
    small_fit(trainer, 3)
    assert (trainer.epoch, len(trainer.history), trainer.stop) == (1, 1, True)
    everywhere = comm.gather_object(checksums(trainer.model.state()))
    assert all(state == everywhere[0] for state in everywhere)


def trainer(
    comm: Communicator | None = None, scheme: type[GradientExchange] = AllReduce
) -> Trainer:
    net = Sequential(Flatten(), Linear(8), BatchNorm(), ReLU(), Linear(10))
    exchange = scheme(comm or Serial())
    return Trainer(Model(net, (8, 8, 1), backend="numpy"), SGD(lr=0.1), exchange=exchange)


DIGITS = load_dataset("digits")


@pytest.mark.threads(2)
def test_the_average_of_all_ranks_is_saved_once(comm, shared_path):
    run = trainer(comm, LocalSGD)
    run.fit(DIGITS[0].subset(range(64)), batch_size=8, steps_per_epoch=3)
    run.save(shared_path / "m.pydtnn")
    loaded = pydtnn.load(shared_path / "m.pydtnn", backend="numpy")
    x, _ = DIGITS[1].read(np.arange(30))
    with run.averaged():
        np.testing.assert_array_equal(loaded.predict(x), run.model.predict(x))
    assert loaded.inputs is not None
    assert loaded.inputs.class_names == tuple("0123456789")


def arrays(like: Any = None, *, halve: bool = False) -> ArrayDataset:
    x, y = DIGITS[1].read(np.arange(100))
    return ArrayDataset(x // 2 if halve else x, y, classes=10, like=like)


MESSAGE = r"^Trainer: array is normalised with its own statistics instead .* ArrayDataset\(x, y, li"


def test_a_test_set_with_statistics_of_its_own_is_warned_of_once():
    run = trainer()
    train = DIGITS[0].subset(range(64))
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        run.fit(train, arrays(), epochs=3)
    assert len(caught) == 1
    run.evaluate(arrays(halve=True))
    other = trainer()
    other.fit(train)
    with pytest.warns(UserWarning, match=MESSAGE):
        other.evaluate(arrays())


def test_a_test_set_like_the_training_set_is_not_warned_of():
    run = trainer()
    train = DIGITS[0].subset(range(64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.fit(train, DIGITS[1])
        for data in (arrays(like=train), DIGITS[0], train, arrays(like=DIGITS[0]).subset([1, 2])):
            run.evaluate(data)


def test_a_loaded_model_is_evaluated_with_the_statistics_of_its_training(tmp_path):
    first = trainer()
    first.fit(DIGITS[0].subset(range(64)))
    first.save(tmp_path / "m")
    run = Trainer(pydtnn.load(tmp_path / "m", backend="numpy"), SGD())
    assert run.evaluate(DIGITS[1]) == first.evaluate(DIGITS[1])
    with pytest.warns(UserWarning, match=MESSAGE):
        run.evaluate(arrays())


@pytest.mark.threads(2)
def test_a_checkpoint_knows_the_inputs(comm, shared_path):
    first = trainer(comm)
    first.fit(DIGITS[0].subset(range(64)), global_batch_size=16)
    save_checkpoint(shared_path, first)
    again = trainer(comm)
    load_checkpoint(shared_path, again)
    x, _ = DIGITS[1].read(np.arange(30))
    np.testing.assert_array_equal(again.model.predict(x), first.model.predict(x))


def test_a_trainer_shows_its_parts():
    text = repr(trainer())
    for part in ("<Model: input 8 x 8 x 1", "SGD(lr=0.1)", "loss=Cat", "metrics=[Acc", "epoch=0"):
        assert part in text
    assert "exchange=AllReduce(Serial(rank 0 of 1))" in text


class Slow(ArrayDataset):
    """Data that take a second to read."""

    def read(self, indices: Any) -> Any:
        spend(1)
        return super().read(indices)


def test_a_trainer_counts_its_seconds_and_begins_new_steps_where_parameters_are_frozen():
    """A captured graph contains the addresses of the arrays."""
    run = small_trainer()
    with clock.used(Ticks()):
        run.fit(Slow(DATA.x, DATA.y), global_batch_size=8, loader_threads=0)
    assert run.seconds["data"] == 4
    before = run.steps
    run.model.freeze("conv2d0")
    small_fit(run, 2)
    assert run.steps is not before
