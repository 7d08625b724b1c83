"""The folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from pydtnn.comm import Communicator
from pydtnn.training.checkpoint import find_checkpoints, folder, load_checkpoint, save_checkpoint
from tests.small_training import small_trainer


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    trainer = small_trainer()
    for step in (1, 2, 10, 11, 100):
        trainer.optimizer.iterations = step
        save_checkpoint(tmp_path, trainer, keep=3)
    assert names(tmp_path) == [f"checkpoint-{step:08d}" for step in (10, 11, 100)]


def test_steps_of_more_than_eight_digits_are_sorted_by_number(tmp_path: Path) -> None:
    trainer = small_trainer()
    for step in (99_999_999, 100_000_000):
        trainer.optimizer.iterations = step
        save_checkpoint(tmp_path, trainer)
    assert [folder.step_of(p) for p in find_checkpoints(tmp_path)] == [99_999_999, 100_000_000]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    trainer = small_trainer()
    for epoch in (1, 2):
        trainer.epoch = epoch
        save_checkpoint(tmp_path, trainer)
    assert names(tmp_path) == ["checkpoint-00000000"]
    load_checkpoint(tmp_path, trainer)
    assert trainer.epoch == 2


def test_checkpoints_of_later_steps_are_removed_once_a_new_one_is_there(tmp_path: Path) -> None:
    trainer = small_trainer()
    for step in (5, 7, 6):
        trainer.optimizer.iterations = step
        save_checkpoint(tmp_path, trainer)
    assert names(tmp_path) == ["checkpoint-00000005", "checkpoint-00000006"]


def test_what_a_killed_process_left_is_ignored_and_then_removed(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-00000003.partial").mkdir()
    (tmp_path / "checkpoint-notes").mkdir()
    trainer = small_trainer()
    assert load_checkpoint(tmp_path, trainer) is None
    save_checkpoint(tmp_path, trainer)
    assert names(tmp_path) == ["checkpoint-00000000", "checkpoint-notes"]


@pytest.mark.threads(1, 2)
def test_without_a_checkpoint_nothing_is_loaded(comm: Communicator, tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path, small_trainer(comm)) is None
    assert load_checkpoint(tmp_path / "none", small_trainer(comm)) is None
