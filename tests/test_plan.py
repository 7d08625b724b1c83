"""What a trainer refuses before it begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.comm.schemes import LocalSGD
from pydtnn.data import ArrayDataset
from pydtnn.errors import AgreedError
from pydtnn.layers import Linear
from pydtnn.optimizers import SGD, Adam
from pydtnn.trainer import Trainer
from tests.small_training import small_data, small_model, small_trainer

VALIDATION = {
    "empty": ((0, 5, 5, 2), "the validation set val has no samples; give one that has, or none"),
    "another shape": ((3, 6, 5, 2), r"val have shape \(6, 5, 2\), those of array \(5, 5, 2\); gi"),
}


@pytest.mark.parametrize(("shape", "words"), VALIDATION.values(), ids=VALIDATION)
def test_what_cannot_be_evaluated_is_refused_before_the_first_epoch(
    shape: tuple[int, ...], words: str
) -> None:
    train, _ = small_data()
    validation = ArrayDataset(np.zeros(shape), np.zeros(shape[0], int), name="val")
    trainer = small_trainer()
    with pytest.raises(ValueError, match=f"^Trainer: .*{words}"):
        trainer.fit(train, validation, global_batch_size=8)
    assert trainer.optimizer.iterations == 0


def test_arrays_in_the_place_of_data_sets_are_told_how_to_become_one() -> None:
    train, _ = small_data()
    x, y = train.read(np.arange(4))
    for given in ((x, y), (train, (x, y))):
        with pytest.raises(TypeError, match=r"^Trainer: expected a data set, .*: ArrayDataset"):
            small_trainer().fit(*given, global_batch_size=2)


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": ({"epochs": 3}, "the same epochs, but it is 2 on rank 0 and 3 on rank 1"),
    "batch": ({"global_batch_size": 4}, "global batch size, but it is 8 on rank 0 and 4 on rank 1"),
    "steps": ({"steps_per_epoch": 2}, "the same steps, but it is 4 on rank 0 and 2 on rank 1"),
    "seed": ({"seed": 1}, "the same seed, but it is 0 on rank 0 and 1 on rank 1"),
    "no validation": ({"validation": None}, "same validated, but it is 16 on rank 0 and 0 on rank"),
    "samples": ({"samples": 25}, "the same samples, but it is 29 on rank 0 and 25 on rank 1"),
    "model": ({"model": 5}, "number of parameters, but it is 195 on rank 0 and 243 on rank 1"),
    "optimizer": ({"optimizer": Adam(0.1)}, "optimizer, but it is 'SGD' on rank 0 and 'Adam' on r"),
    "lr": ({"optimizer": SGD(0.2)}, "learning rate, but it is 0.1 on rank 0 and 0.2 on rank 1"),
}


@pytest.mark.parametrize(("change", "words"), DIFFERENT.values(), ids=DIFFERENT)
@pytest.mark.threads(2)
def test_ranks_that_would_do_different_work_are_refused_before_any(
    comm: Communicator, change: dict[str, Any], words: str
) -> None:
    mine: dict[str, Any] = change if comm.rank == 1 else {}
    train, validation = small_data()
    given = {"validation": validation, "epochs": 2, "global_batch_size": 8, **mine}
    train = train.subset(np.arange(given.pop("samples", len(train))))
    trainer = small_trainer(
        comm,
        model=small_model(filters=given.pop("model", 4)),
        optimizer=given.pop("optimizer", SGD(0.1)),
    )
    with pytest.raises(AgreedError, match=f"^Trainer: all ranks must have .*{words}"):
        trainer.fit(train, **given)
    assert trainer.optimizer.iterations == 0


@pytest.mark.threads(2)
def test_ranks_of_a_scheme_that_lets_them_differ_may_have_their_own_learning_rates(
    comm: Communicator,
) -> None:
    train, _ = small_data()
    own = SGD(0.1 * (1 + comm.rank))
    trainer = small_trainer(comm, optimizer=own, exchange=LocalSGD(comm, period=2))
    assert len(trainer.fit(train, epochs=1, global_batch_size=8)) == 1


PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "a net": ({"model": Linear(3)}, r"model must be a Model, not .*; make one: Model\(net, inp"),
    "a name": ({"optimizer": "sgd"}, "optimizer must be an Optimizer, not 'sgd'"),
    "a class": ({"optimizer": SGD}, r"optimizer must be .*; make one: SGD\(\.\.\.\)"),
    "a scheme's name": (
        {"exchange": "allreduce"},
        "exchange must be a GradientExchange, not 'al",
    ),
    "a function": (
        {"callbacks": [print]},
        "callback must be a Callback, not <built-in funct",
    ),
    "a word": ({"metrics": "accuracy"}, r"metrics must be a list, such as \['accuracy'\], not"),
    "half a pass": ({"accumulation": 1.5}, "accumulation must be a whole number, not 1.5"),
}


@pytest.mark.parametrize(("change", "words"), PARTS.values(), ids=PARTS)
def test_what_a_trainer_is_not_made_of_is_told(change: dict[str, Any], words: str) -> None:
    given = {"model": small_model(), "optimizer": SGD(0.1), **change}
    with pytest.raises(TypeError, match=f"^Trainer: {words}"):
        Trainer(given.pop("model"), given.pop("optimizer"), **given)


def test_numbers_of_epochs_and_samples_are_whole() -> None:
    train, _ = small_data()
    trainer = small_trainer()
    with pytest.raises(TypeError, match=r"^Trainer: epochs must be a whole number, not 1\.5$"):
        trainer.fit(train, epochs=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^Trainer: epochs must be at least 0, not -1$"):
        trainer.fit(train, epochs=-1)
    with pytest.raises(ValueError, match=r"^Trainer: batch_size must be at least 1, not 0$"):
        trainer.evaluate(train, batch_size=0)
