"""Trainers save models that predict elsewhere, and warn where results mean nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pydtnn
from pydtnn import ArrayDataset, Model, Trainer, load_dataset
from pydtnn.comm import Communicator, Serial
from pydtnn.layers import BatchNorm, Flatten, Linear, ReLU, Sequential
from pydtnn.optimizers import SGD
from pydtnn.parallel.schemes import AllReduce, GradientExchange, LocalSGD
from pydtnn.training.checkpoint import load_checkpoint, save_checkpoint


def trainer(
    comm: Communicator | None = None, scheme: type[GradientExchange] = AllReduce
) -> Trainer:
    net = Sequential(Flatten(), Linear(8), BatchNorm(), ReLU(), Linear(10))
    exchange = scheme(comm or Serial())
    return Trainer(Model(net, (8, 8, 1), backend="numpy"), SGD(lr=0.1), exchange=exchange)


DIGITS = load_dataset("digits")


@pytest.mark.threads(2)
def test_the_average_of_all_ranks_is_saved_once(comm: Communicator, shared_path: Path) -> None:
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


def test_a_test_set_with_statistics_of_its_own_is_warned_of_once() -> None:
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


def test_a_test_set_like_the_training_set_is_not_warned_of() -> None:
    run = trainer()
    train = DIGITS[0].subset(range(64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.fit(train, DIGITS[1])
        for data in (arrays(like=train), DIGITS[0], train, arrays(like=DIGITS[0]).subset([1, 2])):
            run.evaluate(data)


def test_a_loaded_model_is_evaluated_with_the_statistics_of_its_training(tmp_path: Path) -> None:
    first = trainer()
    first.fit(DIGITS[0].subset(range(64)))
    first.save(tmp_path / "m")
    run = Trainer(pydtnn.load(tmp_path / "m", backend="numpy"), SGD())
    assert run.evaluate(DIGITS[1]) == first.evaluate(DIGITS[1])
    with pytest.warns(UserWarning, match=MESSAGE):
        run.evaluate(arrays())


@pytest.mark.threads(2)
def test_a_checkpoint_knows_the_inputs(comm: Communicator, shared_path: Path) -> None:
    first = trainer(comm)
    first.fit(DIGITS[0].subset(range(64)), global_batch_size=16)
    save_checkpoint(shared_path, first)
    again = trainer(comm)
    load_checkpoint(shared_path, again)
    x, _ = DIGITS[1].read(np.arange(30))
    np.testing.assert_array_equal(again.model.predict(x), first.model.predict(x))


def test_a_trainer_shows_its_parts() -> None:
    text = repr(trainer())
    for part in ("<Model: input 8 x 8 x 1", "SGD(lr=0.1)", "loss=Cat", "metrics=[Acc", "epoch=0"):
        assert part in text
    assert "exchange=AllReduce(Serial(rank 0 of 1))" in text
