"""The arguments of `fit`, those of other libraries, and the losses of its steps."""

from __future__ import annotations

from typing import Any

import pytest

from pydtnn.comm import Communicator
from pydtnn.training.trainer import Trainer
from pydtnn.utils.names import foreign_names
from tests.small_training import STEPS, small_data, small_trainer


def fit(trainer: Trainer, **options: Any) -> list[dict[str, float]]:
    train, validation = small_data()
    return trainer.fit(train, validation, global_batch_size=8, **options)


def test_more_epochs_continue_from_the_present_state() -> None:
    parts, whole = small_trainer(), small_trainer()
    assert len(fit(parts)) == 1  # without a number of epochs
    assert len(fit(parts, more_epochs=2)) == 3
    assert fit(whole, epochs=3) == parts.history
    fit(whole, more_epochs=0)
    assert whole.epoch == 3


@pytest.mark.threads(2)
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


def test_both_numbers_of_epochs_are_refused() -> None:
    with pytest.raises(TypeError, match="^fit: expected epochs or more_epochs, got both; "):
        fit(small_trainer(), epochs=3, more_epochs=2)
    with pytest.raises(ValueError, match="^Trainer: more_epochs must be at least 0, got -1"):
        fit(small_trainer(), more_epochs=-1)


def test_an_argument_of_another_library_names_ours_and_a_misspelt_one_the_nearest() -> None:
    trainer = small_trainer()
    for name in foreign_names()["values"]["fit_argument"]:
        with pytest.raises(TypeError, match=f"^fit: there is no argument `{name}`; "):
            fit(trainer, **{name: 1})
    with pytest.raises(TypeError, match="^fit: unknown argument 'epoch'; did you mean 'epochs'"):
        fit(trainer, epoch=3)
    assert trainer.epoch == 0
