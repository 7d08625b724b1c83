"""Times, bytes and memory of every epoch in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pydtnn.tools.measurements import MeasurementWriter
from pydtnn.utils.errors import AgreedError
from tests.small_training import STEPS, small_fit, small_trainer


def read(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "measurements.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.threads(1, 2)
def test_every_epoch_has_a_line_with_its_intervals_and_the_times_of_all_ranks(comm, tmp_path):
    trainer = small_trainer(comm, MeasurementWriter(tmp_path))
    small_fit(trainer, epochs=2)
    trainer.comm.barrier()
    lines = read(tmp_path)
    assert [line["epoch"] for line in lines] == [1, 2]
    for epoch, line in enumerate(lines):
        intervals = line["intervals"]
        assert intervals["step"] == [1, 2, 3, 4]
        assert intervals["samples"] == [8, 8, 8, 5]
        assert intervals["loss"] == trainer.losses[STEPS * epoch :][:STEPS]
        assert len(line["ranks"]) == comm.size
        for rank in line["ranks"]:
            assert sum(intervals["seconds"]) <= line["ranks"][0]["total"]
            parts = rank["steps"] + rank["data"] + rank["evaluation"]
            assert 0 <= rank["communication"] < rank["steps"] < parts < rank["total"]
            assert rank["peak_memory"] > 1e6
    assert lines[1]["intervals"]["lr"][-1] == trainer.history[-1]["lr"]
    total = sum(line["ranks"][comm.rank]["bytes"] for line in lines)
    assert 0 < total <= trainer.comm.traffic.bytes or comm.size == 1


def test_a_file_that_cannot_be_created_ends_the_run_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AgreedError, match="MeasurementWriter: cannot write .*; choose another"):
        small_fit(small_trainer(None, MeasurementWriter(tmp_path / "file")))


def test_long_epochs_have_at_most_fifty_intervals(tmp_path):
    writer, trainer = MeasurementWriter(tmp_path), small_trainer()
    writer.on_fit_ready(trainer, 1, 120)
    writer.on_epoch_start(trainer)
    for trainer.step in range(1, 121):
        trainer.losses.append(float(trainer.step))
        writer.on_step_end(trainer)
    writer.on_epoch_end(trainer)
    [line] = read(tmp_path)
    assert line["intervals"]["step"] == [*range(3, 121, 3)]
    assert line["intervals"]["loss"] == [*range(2, 120, 3)]


def test_a_further_fit_continues_the_file_and_another_run_replaces_it(tmp_path):
    trainer = small_trainer(None, MeasurementWriter(tmp_path))
    small_fit(trainer, epochs=1)
    small_fit(trainer, epochs=2)
    assert [line["epoch"] for line in read(tmp_path)] == [1, 2]
    small_fit(small_trainer(None, MeasurementWriter(tmp_path)), epochs=1)
    assert [line["epoch"] for line in read(tmp_path)] == [1]
