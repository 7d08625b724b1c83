"""When checkpoints are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pydtnn.callbacks import (
    Checkpointer,
    EarlyStopping,
    HistoryWriter,
)
from pydtnn.training.checkpoint import find_checkpoints
from pydtnn.utils.errors import AgreedError
from tests.small_training import (
    small_fit,
    small_trainer,
)


def steps_saved(directory: Path) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in find_checkpoints(directory)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every_epochs": 1, "keep": 9}, [4, 8, 12]),
        ({"every_epochs": 2, "keep": 9}, [8, 12]),
        ({"every_epochs": None, "every_steps": 5, "keep": 9}, [5, 10, 12]),
        ({"every_steps": 3, "keep": 9}, [3, 4, 6, 8, 9, 12]),
        ({"every_epochs": None, "every_steps": 1, "keep": 2}, [11, 12]),
    ],
)
def test_checkpoints_are_saved_at_the_intervals_and_at_the_end(
    options: dict[str, Any], expected: list[int], tmp_path: Path
) -> None:
    small_fit(small_trainer(None, Checkpointer(tmp_path, **options)), epochs=3)
    assert steps_saved(tmp_path) == expected


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_another(tmp_path: Path) -> None:
    small_fit(small_trainer(None, Checkpointer(tmp_path)), epochs=1)
    with pytest.raises(
        AgreedError, match=r"contains checkpoint-00000004 of another run; resume from"
    ):
        small_fit(small_trainer(None, Checkpointer(tmp_path)))


def test_a_checkpointer_wants_to_come_after_callbacks_with_state(tmp_path: Path) -> None:
    trainer = small_trainer(None, Checkpointer(tmp_path), EarlyStopping())
    with pytest.raises(
        AgreedError, match=r"EarlyStopping comes after it .* put the Checkpointer last"
    ):
        small_fit(trainer)
    small_fit(small_trainer(None, Checkpointer(tmp_path), HistoryWriter(tmp_path)), epochs=1)
