"""The table of runs."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import pytest

from pydtnn.tools.runs import load_run
from pydtnn.tools.runs.__main__ import main
from pydtnn.tools.runs.table import NONE, select_rows, show
from tests.each import each
from tests.tools.report.folders import write_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder "runs" with three runs, of which one has not been measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    for number, (name, lr, model) in enumerate(
        (("mlp-1", 0.1, "mlp"), ("mlp-2", 0.3, "mlp"), ("cnn-a-long-name-of-a-sweep", 0.2, "cnn"))
    ):
        options = {"model": model, "dataset": "digits", "lr": lr, "epochs": 3 + number}
        write_run(
            tmp_path / "runs" / name,
            ranks=number + 1,
            configuration=options,
            started=f"2026-01-0{number + 1}T10:00:00+00:00",
        )
    (tmp_path / "runs" / "mlp-2" / "measurements.jsonl").unlink()
    return tmp_path / "runs"


def names(printed: str) -> list[str]:
    return [line.split()[0].removeprefix("runs/") for line in printed.splitlines()[1:]]


def test_a_row_has_the_results_and_the_state_of_a_run(runs, capsys):
    assert main([]) == 0
    head, first, second, _ = capsys.readouterr().out.splitlines()
    columns = "run model data ranks epochs best val_accuracy samples/s time started state"
    assert head.split() == columns.split()
    cells = "runs/mlp-1 mlp digits 1 3/3 0.1000 @ 1 640 4.5 s 2026-01-01 10:00 finished"
    assert first.split() == cells.split()
    assert second.split()[-5:] == [NONE, NONE, "2026-01-02", "10:00", "interrupted"]


@each(
    ("options", "expected"),
    [
        ([], ["mlp-1", "mlp-2", "cnn-a-long-name-of-a-sweep"]),
        (["--sort=lr", "--reverse"], ["mlp-2", "cnn-a-long-name-of-a-sweep", "mlp-1"]),
        (["--sort=rate"], ["mlp-1", "cnn-a-long-name-of-a-sweep", "mlp-2"]),
        (["--sort=model"], ["cnn-a-long-name-of-a-sweep", "mlp-1", "mlp-2"]),
        (["--filter=model=ml*"], ["mlp-1", "mlp-2"]),
        (["--filter=model!=mlp"], ["cnn-a-long-name-of-a-sweep"]),
        (["--filter=lr>=0.2", "--filter", "planned<5"], ["mlp-2"]),
        (["--filter=state=finished"], ["mlp-1"]),
        (["--filter=loss<0.1"], []),
        (["runs/mlp-1"], ["mlp-1"]),
        (["--filter=started>2026-01-02"], ["mlp-2", "cnn-a-long-name-of-a-sweep"]),
    ],
)
def test_rows_are_sorted_and_filtered_by_columns_options_and_results(
    options, expected, runs, capsys
):
    assert main(options) == 0
    assert names(capsys.readouterr().out) == expected


@each(
    ("options", "said"),
    [
        (["--sort=lrr"], "unknown column or option 'lrr'"),
        (["--filter=lr"], "--filter must be a column or an option with a value"),
        (["--filter=modle=a"], "unknown column or option 'modle'; did you mean 'model'?"),
        (["--diff", "mlp-1"], "--diff requires at least 2 runs, got 1"),
        (["nothing"], "nothing does not exist; name the folder"),
        (["--diff", "mlp-1", "mlp-9"], "mlp-9 does not exist; give the folder of a run"),
    ],
)
def test_a_mistake_is_one_sentence(options, said, runs, capsys):
    assert main(options) == 1
    printed, told = capsys.readouterr()
    assert printed == ""
    assert told.startswith("runs: ")
    assert said in told
    assert told.count("\n") == 1


@each("width", [30, 50, 60, 80, 100, 120, 200])
def test_a_table_is_not_wider_than_the_terminal(width, runs, capsys, monkeypatch):
    rows = select_rows([load_run(path) for path in sorted(runs.iterdir())], [], "run")
    lines = show(rows, width)
    assert max(map(len, lines)) <= max(width, 52)  # four columns are always shown
    assert all("finished" in line or "interrupted" in line for line in lines[1:])
    if width == 200:
        assert lines == show(rows, None)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= max(width, 52)


def test_differences_are_options_and_facts(runs, capsys):
    assert main(["--diff", "mlp-1", "runs/cnn-a-long-name-of-a-sweep"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows == {
        "model": ["mlp", "cnn"],
        "lr": ["0.1", "0.2"],
        "epochs": ["3", "5"],
        "ranks": ["1", "3"],
        "best": ["0.1000", "0.1000"],
    }


def test_json_and_csv_have_the_numbers_in_full(runs, capsys):
    assert main(["--format=json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["rate"] for row in rows] == [pytest.approx(640), None, pytest.approx(1920)]
    assert rows[1]["configuration"]["lr"] == 0.3
    assert main(["--format=csv"]) == 0
    table = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert [(row["run"], row["best"]) for row in table[:2]] == [
        ("runs/mlp-1", "0.1"),
        ("runs/mlp-2", "0.1"),
    ]


def test_a_damaged_run_is_reported_beside_the_others(runs, capsys):
    (runs / "mlp-2" / "run.json").write_text("{")
    os.utime(runs / "mlp-2" / "run.json")
    assert main(["runs"]) == 0
    printed, told = capsys.readouterr()
    assert names(printed) == ["mlp-1", "cnn-a-long-name-of-a-sweep"]
    assert "runs: runs/mlp-2/run.json is damaged: it cannot be parsed" in told
