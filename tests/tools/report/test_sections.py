"""The sections of a report, from runs whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pydtnn.tools.report.curves import throughput, training
from pydtnn.tools.report.overview import configuration, environment, overview
from pydtnn.tools.report.predicted import predicted
from pydtnn.tools.report.runs import RunView, read_runs
from pydtnn.tools.report.scaling import scaling
from pydtnn.tools.report.section import Figure, Section, spread_places
from pydtnn.tools.report.steps import MAX_RANKS, phases
from tests.each import each
from tests.tools.report.folders import EPOCHS, write_run


def runs(tmp_path: Path, *ranks: int, **entries: Any) -> list[RunView]:
    return read_runs([write_run(tmp_path / f"run-{n}", ranks=n, **entries) for n in ranks])


def figure(section: Section, title: str) -> Figure:
    return next(figure for figure in section.figures if figure.title == title)


def test_curves_are_those_of_the_intervals_and_of_validation_those_of_epochs(tmp_path):
    section = training(runs(tmp_path, 1))
    assert [found.title for found in section.figures] == ["Loss", "Accuracy", "Learning rate"]
    inside, ends = figure(section, "Loss").data
    assert len(inside["x"]) == 10 * EPOCHS
    assert (inside["name"], ends["name"]) == ("training", "validation")
    assert ends["y"] == [None] * EPOCHS
    assert figure(section, "Accuracy").data[0]["x"] == [1, 2, 3]
    rates = throughput(runs(tmp_path / "two", 1, 2)).figures[0].data
    assert [one["y"].tolist() for one in rates] == [pytest.approx([n] * 30) for n in (640, 1280)]


def test_parts_of_a_rank_add_up_to_its_time(tmp_path):
    section = phases(runs(tmp_path, 2))
    ranks, epochs = section.figures
    by_name = {bars["name"]: bars["x"][1] for bars in ranks.data}
    assert sum(by_name.values()) == pytest.approx(3 * 1.5)
    assert by_name["compute"] == pytest.approx(3 * 0.7)
    assert by_name["callbacks"] == pytest.approx(3 * 0.2)
    assert {bars["name"]: bars["y"][0] for bars in epochs.data} == pytest.approx(
        {name: seconds / 3 for name, seconds in by_name.items()}
    )


def test_of_many_values_the_smallest_and_the_largest_are_shown():
    seconds = [float((7 * rank) % 101) for rank in range(101)]
    shown = spread_places(seconds, MAX_RANKS)
    assert len({*shown}) == MAX_RANKS
    assert {seconds.index(0.0), seconds.index(100.0)} < {*shown}
    assert spread_places([2.0, 1.0], MAX_RANKS) == [0, 1]


def test_efficiency_is_relative_to_the_run_with_the_fewest_ranks(tmp_path):
    four, two = runs(tmp_path, 4, 2)
    for epoch in four.intervals:
        epoch.seconds *= 2
    section = scaling([four, two])
    [table] = section.tables
    assert [row[:2] + row[4:6] for row in table.rows] == [
        ["run-2", "2 x 1 thread", "1.00", "100 % (100 to 100 %)"],
        ["run-4", "4 x 1 thread", "1.00", "50 % (50 to 50 %)"],
    ]
    ideal, measured = figure(section, "Throughput").data
    assert ideal["y"] == pytest.approx([1280, 2560])
    assert measured["y"] == pytest.approx([1280, 1280])
    parts = {bars["name"]: bars["y"] for bars in figure(section, "Time per step").data}
    assert parts["communication"] == pytest.approx([10, 10])  # ms: 0.2 s in 20 steps


@each(("most", "scale"), [(16, "linear"), (17, "log")])
def test_axes_are_logarithmic_for_more_than_eight_times_as_many_ranks(most, scale, tmp_path):
    section = scaling(runs(tmp_path, 2, 8, most))
    assert figure(section, "Throughput").x["type"] == scale


def test_runs_with_other_options_are_another_series_of_the_same_run_on_one_rank(tmp_path):
    [one] = runs(tmp_path, 1)
    others = []
    for name in ("ring", "tree"):
        options = {"model": "mlp", "dataset": "synthetic", "allreduce": name}
        others += runs(tmp_path / name, 2, 4, configuration=options)
    section = scaling([one, *others])
    assert [row[1][0] for row in section.tables[0].rows] == ["1", "2", "4", "1", "2", "4"]
    names = [trace["name"] for trace in figure(section, "Throughput").data]
    assert names == ["ideal", "allreduce ring", "ideal", "allreduce tree"]
    assert len(figure(section, "Time per step").data[0]["x"]) == 5
    alike = scaling(runs(tmp_path / "a", 2) + runs(tmp_path / "b", 2))
    assert alike.empty
    assert "name several RUNs" in alike.absent


def test_efficiencies_have_a_spread_and_the_number_of_cores_with_warnings(tmp_path):
    """Four ranks on two cores, beside one rank whose fastest intervals are twice as fast."""
    cpu = {"environment": {"cpu": {"usable": 2}}, "hosts": 1}
    one, four = runs(tmp_path, 1, 4, **cpu)
    for epoch in one.intervals:
        epoch.seconds[:] = [0.5, 0.4] * 5
    section = scaling([one, four])
    row = section.tables[0].rows[1]
    assert row[1] == "4 x 1 thread on 2 cores"
    assert row[3] == "2,560 (2,560 to 2,560)"
    assert row[5] == "444 % (400 to 500 %)"  # 640 samples/s per rank over 128 to 160
    assert "run-4 has more threads than cores (4 x 1 thread on 2 cores)" in section.text
    assert "The efficiency of run-4, 444 %, is above 100 %" in section.text
    bars = figure(section, "Parallel efficiency").data[1]["error_y"]
    assert bars["array"] == pytest.approx([0, 500 - 4000 / 9])
    assert bars["arrayminus"] == pytest.approx([0, 4000 / 9 - 400])


def test_runs_that_are_in_no_series_are_named_with_the_reason(tmp_path):
    options = {"configuration": {"model": "cnn", "dataset": "synthetic"}}
    [alone] = runs(tmp_path / "alone", 2, **options)
    unmeasured = write_run(tmp_path / "old", ranks=8)
    (unmeasured / "measurements.jsonl").unlink()
    pair = runs(tmp_path, 1, 2)
    section = scaling([*pair, alone, *read_runs([unmeasured])])
    text = "Left out: run-2, as no run has another number of ranks than 2 and the same options"
    assert f"{text} (model cnn)." in section.text
    assert "Left out: old, which was not measured." in section.text
    assert {row[0] for row in section.tables[0].rows} == {"run-1", "run-2"}
    nothing = scaling([pair[0], alone])
    assert nothing.empty
    assert "run-2, as no run has another number of ranks than 2" in nothing.absent


def test_options_that_differ_are_highlighted_and_others_are_folded(tmp_path):
    found = runs(tmp_path, 1) + runs(tmp_path / "b", 2, lr=0.2)
    differing, equal, facts, _ = configuration(found).tables
    assert differing.rows == [["lr", "0.1", "0.2"]]
    assert [*differing.differing] == [0]
    assert equal.folded
    assert ["model", "mlp"] in equal.rows
    assert ["ranks", "1", "2"] in facts.rows
    [machine] = environment(found).tables
    assert machine.folded
    assert ["cpu cores", "2"] in machine.rows


def test_results_are_those_of_the_last_epoch(tmp_path):
    [table] = overview(runs(tmp_path, 1, 2)).tables
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["training loss"] == ["0.6667", "0.6667"]
    assert cells["validation loss"] == ["–", "–"]  # noqa: RUF001
    assert cells["best validation accuracy"] == ["0.1000", "0.1000"]
    assert cells["best epoch"] == ["1", "1"]
    assert cells["samples/s"] == ["640", "1,280"]
    assert cells["time in epochs"] == ["4.5 s", "4.5 s"]
    assert len(overview(runs(tmp_path / "many", 1, 2, 3, 4, 5)).tables[0].rows) == 5


def test_the_best_epoch_is_that_of_the_monitored_value_or_of_the_validation(tmp_path):
    [run] = runs(tmp_path, 1)
    assert run.monitored == "val_accuracy"
    for epoch, logs in enumerate(run.history):
        logs |= {"val_accuracy": [0.2, 0.4, 0.3][epoch], "val_loss": [None, 3.0, 2.0][epoch]}
    bests = [run.best(name) for name in ("val_accuracy", "val_loss", "val_mse")]
    assert bests == [(2, 0.4), (3, 2.0), None]
    run.about["configuration"]["monitor"] = "val_loss"
    assert run.monitored == "val_loss"


def test_swept_options_are_in_the_results_and_in_the_names_of_runs(tmp_path):
    first = write_run(tmp_path / "a", lr=0.1)
    found = read_runs([first, *(write_run(tmp_path / f"b{i}", lr=0.2) for i in range(4))])
    [table] = overview(found).tables
    assert table.sortable
    place = table.columns.index("lr")
    assert [row[place] for row in table.rows] == ["0.1", *["0.2"] * 4]
    assert [*training(found).legend][:2] == ["a (lr 0.1)", "b0 (lr 0.2)"]
    *names, inside, ends = training(found).legend
    assert (inside, ends) == ("training", "validation")
    assert {trace["name"] for trace in figure(training(found), "Loss").data} == {*names}


def test_values_of_virtual_ranks_are_over_their_time(tmp_path):
    folder = write_run(tmp_path / "run")
    history = json.loads((folder / "history.json").read_text())
    for entry in history:
        entry["virtual_seconds"] = 0.5 * entry["epoch"]
    (folder / "history.json").write_text(json.dumps(history))
    other = write_run(tmp_path / "other")  # on ranks that are not virtual
    found = training(read_runs([folder, other]))
    assert "Virtual seconds" not in [one.title for one in found.figures]
    drawn = figure(found, "Accuracy over virtual time")
    assert len(drawn.data) == 2  # training and validation
    assert drawn.data[0]["x"] == [0.5 * entry["epoch"] for entry in history]
    assert drawn.data[0]["y"] == [entry["accuracy"] for entry in history]


PREDICTED = {
    **{"platform": "this job", "seconds": 0.05, "compute": 0.03, "update": 0.005},
    **{"communication": 0.01, "data": 0.005, "memory": 1e8, "reason": ""},
}


def test_measured_parts_of_a_step_are_beside_the_predicted_ones(tmp_path):
    """20 steps of 0.9 / 20 s, of which 0.2 / 20 s are communication, and 0.1 / 20 s of data."""
    folder = write_run(tmp_path / "run", predicted=PREDICTED)
    [table] = predicted(read_runs([folder])).tables
    assert table.rows == [
        ["time per step", "50 ms", "50 ms"],
        ["compute and update", "35 ms", "35 ms"],
        ["communication, exposed", "10 ms", "10 ms"],
        ["waiting for data", "5 ms", "5 ms"],
        ["accuracy", "", "100%"],
        ["memory of a rank, without interpreter and data", "", "100 MB"],
    ]
    parts = {"compute": 0.03, "communication": 0.008, "data": 0.002}
    measured = {"seconds": 0.04, "low": 0.038, "high": 0.05, "first": 0.4, **parts}
    folder = write_run(tmp_path / "ended", predicted=PREDICTED, measured=measured)
    file = folder / "measurements.jsonl"
    file.write_text(file.read_text().replace('"peak_memory"', '"step_memory": 9e7, "peak_memory"'))
    [table] = predicted(read_runs([folder])).tables
    assert table.rows[:2] == [
        ["time per step", "40 ms", "50 ms"],
        ["first and last decile of the steps", "38 ms to 50 ms", ""],
    ]
    assert ["first step, with the choice of algorithms", "400 ms", ""] in table.rows
    assert ["accuracy", "", "75%"] in table.rows
    assert table.rows[-1][1:] == ["90 MB", "100 MB"]


@each(
    ("entry", "reason"),
    [
        (None, "no run has a prediction in run.json"),
        ({"reason": "no formula for --exact"}, "no formula for --exact"),
        (PREDICTED | {"seconds": 0}, "no run has a prediction in run.json"),
    ],
)
def test_a_run_without_a_prediction_says_why(tmp_path, entry, reason):
    section = predicted(read_runs([write_run(tmp_path / "run", predicted=entry)]))
    assert section.empty
    assert section.absent == reason


def test_a_run_without_measurements_says_how_to_get_them(tmp_path):
    folder = write_run(tmp_path / "run")
    for name in ("measurements.jsonl", "run.json"):
        (folder / name).unlink()
    found = read_runs([folder])
    assert "MeasurementWriter" in throughput(found).absent
    assert "MeasurementWriter" in phases(found).absent
    assert "python -m pydtnn.train" in configuration(found).absent
    assert "python -m pydtnn.train" in environment(found).absent
    assert not training(found).empty
    assert not overview(found).empty


def test_numbers_of_a_figure_are_short_and_its_text_cannot_end_the_script():
    text = Figure("t", [{"y": [1 / 3, float("nan")]}], "</script>", "y").json()
    assert json.loads(text)["data"][0]["y"] == [0.333333, None]
    assert "<" not in text
