"""The results of every epoch in files."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

from pydtnn.callbacks import HistoryWriter
from tests.small_training import Recorder, small_fit, small_trainer

NAN = math.nan


def test_history_is_written_after_every_epoch_as_table_and_as_json(tmp_path):
    lengths = []
    look = Recorder(on_epoch=lambda t: lengths.append(len(read_csv(tmp_path))))
    trainer = small_trainer(None, HistoryWriter(tmp_path / "run"), look)
    tmp_path = tmp_path / "run"
    history = small_fit(trainer, epochs=2)
    assert lengths == [1, 2]
    expected = [{"epoch": i, **logs} for i, logs in enumerate(history, 1)]
    assert json.loads((tmp_path / "history.json").read_text()) == expected
    table = [{k: float(v) for k, v in row.items()} for row in read_csv(tmp_path)]
    assert table == expected
    assert list(table[0]) == ["epoch", "loss", "accuracy", "lr", "val_loss", "val_accuracy"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["history.csv", "history.json"]


def read_csv(directory: Path) -> list[dict[str, str]]:
    with open(directory / "history.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_history_in_json_has_null_for_what_json_does_not_know(tmp_path):
    trainer = small_trainer()
    trainer.history = [{"loss": NAN, "val_loss": math.inf}]
    HistoryWriter(tmp_path).on_epoch_end(trainer)
    expected = [{"epoch": 1, "loss": None, "val_loss": None}]
    assert json.loads((tmp_path / "history.json").read_text()) == expected
