"""The folder of checkpoints."""

from __future__ import annotations

from pathlib import Path

from pydtnn.training.checkpoint import find_checkpoints, folder, load_checkpoint, save_checkpoint
from tests.each import each
from tests.small_training import small_trainer


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@each(
    ("steps", "kept"),
    [
        ((1, 2, 10, 11, 100), (10, 11, 100)),
        ((5, 7, 6), (5, 6)),  # those of later steps are removed once a new one is there
        ((99_999_999, 100_000_000), (99_999_999, 100_000_000)),
    ],
)
def test_only_the_last_checkpoints_are_kept(steps, kept, tmp_path):
    trainer = small_trainer()
    assert load_checkpoint(tmp_path / "none", trainer) is None
    for step in steps:
        trainer.optimizer.iterations = step
        save_checkpoint(tmp_path, trainer, keep=3)
    assert [folder.step_of(path) for path in find_checkpoints(tmp_path)] == [*kept]


def test_what_a_killed_process_left_is_ignored_and_then_removed(tmp_path):
    (tmp_path / ".checkpoint-00000003.partial").mkdir()
    (tmp_path / "checkpoint-notes").mkdir()
    trainer = small_trainer()
    assert load_checkpoint(tmp_path, trainer) is None
    save_checkpoint(tmp_path, trainer)
    assert names(tmp_path) == ["checkpoint-00000000", "checkpoint-notes"]
