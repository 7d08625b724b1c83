"""Folders of runs as reports read them."""

import json

import pytest

from pydtnn.tools.report.runs import read_runs
from tests.each import each
from tests.tools.report.folders import EPOCHS, measured, write_run


def test_a_run_has_its_history_intervals_and_numbers_of_ranks(tmp_path):
    [run] = read_runs([write_run(tmp_path / "run", ranks=2)])
    assert run.label == "run"
    assert run.size == 2
    assert run.samples_per_second() == pytest.approx(1280)
    assert len(run.history) == len(run.intervals) == EPOCHS
    assert run.history[0]["val_loss"] is None
    assert run.totals()[1]["evaluation"] == pytest.approx(0.9)
    assert run.totals()[1]["peak_memory"] == 2e8


def test_a_run_of_an_earlier_version_has_a_history_only(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "measurements.jsonl").unlink()
    (folder / "run.json").unlink()
    [run] = read_runs([folder])
    assert (run.size, run.configuration, run.intervals) == (None, {}, [])
    assert run.samples_per_second() is None


def test_of_an_epoch_that_was_repeated_the_last_line_is_valid(tmp_path):
    folder = write_run(tmp_path / "run", ranks=4)
    with (folder / "measurements.jsonl").open("a") as file:
        file.write('{"epoch": 2, "intervals": {"st\n')  # cut short
        for epoch in (2, 3, EPOCHS + 1):
            file.write(json.dumps(measured(epoch, 2)) + "\n")
    [run] = read_runs([folder])
    assert [len(ranks) for ranks in run.ranks] == [4, 2, 2]
    assert [rank["total"] for rank in run.totals()] == [3.0, 3.0]


def test_labels_of_runs_differ(tmp_path):
    folders = [write_run(tmp_path / name) for name in ("a/run", "b/run", "b/other")]
    assert [run.label for run in read_runs(folders)] == ["a/run", "b/run", "other"]


@each(
    ("name", "content", "said"),
    [
        ("history.json", None, "contains a run without a completed epoch; wait until"),
        ("history.json", "[]", "contains a run without a completed epoch; wait until"),
        ("history.json", "[", "history.json is damaged: it cannot be parsed; give"),
        ("history.json", "[1]", "history.json is damaged: it must contain an object for each"),
        ("run.json", "[]", "run.json is damaged: it must contain an object; give"),
    ],
)
def test_a_folder_without_a_readable_run_is_refused(tmp_path, name, content, said):
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=f"^report: .*{said}"):
        read_runs([folder])


def test_a_folder_that_is_missing_or_named_twice_is_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"report: .*empty contains no run; give the folder"):
        read_runs([tmp_path / "empty"])
    with pytest.raises(ValueError, match=r"report: .*nothing does not exist; give the folder"):
        read_runs([tmp_path / "nothing"])
    with pytest.raises(ValueError, match=r"report: .*run\.json is a file; give the folder"):
        read_runs([folder / "run.json"])
    with pytest.raises(ValueError, match=r"report: .*run is given twice; name each run once"):
        read_runs([folder, folder.parent / "." / "run"])
