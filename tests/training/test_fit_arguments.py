"""The arguments of `fit`, those of other libraries, and the losses of its steps."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import pytest

from pydtnn.comm import Communicator
from pydtnn.training.checks import OWN
from pydtnn.training.trainer import Trainer
from pydtnn.utils.names import foreign_names
from tests.each import each
from tests.small_training import STEPS, small_data, small_fit, small_trainer


def fit(trainer: Trainer, **options: Any) -> list[dict[str, float]]:
    train, validation = small_data()
    return trainer.fit(train, validation, global_batch_size=8, **options)


def test_more_epochs_continue_from_the_present_state() -> None:
    parts, whole = small_trainer(), small_trainer()
    fit(parts, epochs=2)
    assert len(fit(parts, more_epochs=1)) == 3
    assert fit(whole, epochs=3) == parts.history
    fit(whole, more_epochs=0)
    assert whole.epoch == 3


def test_without_a_number_of_epochs_there_is_one() -> None:
    assert len(fit(small_trainer())) == 1


def test_epochs_that_are_complete_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    trainer = small_trainer()
    with caplog.at_level(logging.INFO, "pydtnn"):
        fit(trainer, epochs=1)
        caplog.clear()
        fit(trainer, epochs=1)
    sentence = "fit: nothing to train: 1 epoch is complete, and epochs=1 counts from the beginning"
    assert caplog.messages == [f"{sentence}; pass more_epochs=1 to train on"]


@pytest.mark.threads(1, 2)
def test_without_a_batch_size_a_few_samples_are_one_step(comm: Communicator) -> None:
    trainer, (train, validation) = small_trainer(comm), small_data()
    trainer.fit(train, validation)
    assert trainer.global_batch_size == len(train) < 64
    assert len(trainer.losses) == 1
    with pytest.raises(ValueError, match=f"batch must be at most the {len(train)} samples"):
        trainer.fit(train, batch_size=64, more_epochs=1)


def test_the_last_smaller_step_is_omitted_on_request() -> None:
    trainer, (train, _) = small_trainer(), small_data()
    trainer.fit(train, epochs=2, global_batch_size=8, drop_last=True)
    assert len(trainer.losses) == 2 * (STEPS - 1)
    assert trainer.samples_seen == 2 * 8 * (STEPS - 1)
    trainer.fit(train.subset(range(24)), more_epochs=1, global_batch_size=8, drop_last=True)
    assert len(trainer.losses) == 2 * (STEPS - 1) + 3  # all of them are whole


@pytest.mark.threads(1, 2)
def test_batches_of_evaluations_are_per_rank_or_of_all_ranks_as_those_of_fit(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, (train, _) = small_trainer(comm), small_data()
    sizes = []
    made = type(trainer.setup).loader

    def loader(setup: Any, dataset: Any, batch_size: int, *args: Any, **options: Any) -> Any:
        sizes.append(batch_size)
        return made(setup, dataset, batch_size, *args, **options)

    monkeypatch.setattr(type(trainer.setup), "loader", loader)
    trainer.evaluate(train, batch_size=4)
    trainer.evaluate(train, global_batch_size=4)
    trainer.evaluate(train)
    comm.barrier()
    assert sorted(sizes) == sorted([4 * comm.size, 4, 256] * comm.size)


def test_both_numbers_of_epochs_are_refused() -> None:
    with pytest.raises(TypeError, match="^fit: expected epochs or more_epochs, got both; "):
        fit(small_trainer(), epochs=3, more_epochs=2)
    with pytest.raises(ValueError, match="^Trainer: more_epochs must be at least 0, got -1"):
        fit(small_trainer(), more_epochs=-1)


@each("name", foreign_names()["values"]["fit_argument"])
def test_an_argument_of_another_library_names_ours(name: str) -> None:
    trainer = small_trainer()
    with pytest.raises(TypeError, match=f"^fit: there is no argument `{name}`; "):
        fit(trainer, **{name: 1})
    assert trainer.epoch == 0


def test_a_misspelt_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="^fit: unknown argument 'epoch'; did you mean 'epochs'"):
        fit(small_trainer(), epoch=3)


def test_the_names_that_are_suggested_are_those_of_fit() -> None:
    names = [*inspect.signature(Trainer.fit).parameters]
    assert names == ["self", *OWN, "others"]


@pytest.mark.threads(1, 2)
def test_losses_are_those_of_all_steps_over_all_ranks(comm: Communicator) -> None:
    trainer = small_trainer(comm)
    small_fit(trainer, epochs=2)
    assert len(trainer.losses) == 2 * STEPS
    assert all(type(loss) is float for loss in trainer.losses)
    assert comm.gather_object(trainer.losses) == [trainer.losses] * comm.size
    sizes = [8, 8, 8, 5]  # the last batch is smaller
    for epoch, logs in enumerate(trainer.history):
        own = trainer.losses[epoch * STEPS : (epoch + 1) * STEPS]
        assert np.average(own, weights=sizes) == pytest.approx(logs["loss"], rel=1e-12)
