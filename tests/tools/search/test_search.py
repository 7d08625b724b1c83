"""Searches from beginning to end: groups of ranks, failures, interruptions, the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pydtnn.tools.search import Trial, make_space, run
from pydtnn.tools.search.__main__ import main
from pydtnn.tools.search.groups import check_groups, explain
from pydtnn.tools.search.study import SharedStudy
from pydtnn.train import main as train
from tests.each import each
from tests.launch import Finished, why_not
from tests.launch import run as launch

pytest.importorskip("optuna")

FIXED = {
    "model": "mlp",
    "dataset_options": {"samples": 120, "test_samples": 40, "shape": [12, 12, 1], "classes": 4},
    "global_batch_size": 16,
    "epochs": 2,
}
SPACE: dict[str, Any] = {
    "fixed": FIXED,
    "space": {
        "lr": {"low": 1e-3, "high": 1.0, "log": True},
        "optimizer": ["sgd", "adamw"],
        "momentum": {"low": 0.5, "high": 0.9, "if": {"optimizer": "sgd"}},
    },
    "trials": 5,
}
Capture = pytest.CaptureFixture[str]


def results(study: Any) -> list[Any]:
    return [(one.number, one.params, one.values, one.state.name) for one in study.trials]


def stored(folder: Path, space: dict[str, Any] = SPACE) -> list[Any]:
    return results(SharedStudy(folder, make_space(**space)).study)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `SPACE` in space.yaml, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(json.dumps(SPACE))
    return tmp_path


def test_trials_are_runs_of_training(written, capsys):
    assert main(["space.yaml", "--trials=2"]) == 0
    before = stored(written / "runs" / "space")
    capsys.readouterr()
    assert main(["space.yaml", "--export", "best.yaml"]) == 0
    assert stored(written / "runs" / "space")[:2] == before
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "search: 5 trials of 3 options, 1 group of 1 rank, study runs/space"
    assert lines[1] == "continuing: 2/5 trials have ended"
    assert [line.split("  ")[0] for line in lines[2:5]] == [f"{n}/5" for n in range(3, 6)]
    found = stored(written / "runs" / "space")
    values = [one[2][0] for one in found]
    best = values.index(max(values))
    assert f"best: val_accuracy {max(values):.4g}  trial {best}" in lines
    for number, params, (value,), _ in found:
        folder = written / "runs" / "space" / f"trial-{number:05d}"
        about = json.loads((folder / "run.json").read_text())["configuration"]
        assert {name: about[name] for name in params} == params
        history = json.loads((folder / "history.json").read_text())
        assert history[-1]["val_accuracy"] == value
    capsys.readouterr()
    assert train(["--config", "best.yaml", "--output-dir=again", "--quiet", "--threads=1"]) == 0
    again = json.loads((written / "again" / "history.json").read_text())
    assert again[-1]["val_accuracy"] == pytest.approx(max(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"space": {"lrr": [0.1]}}, "train: unknown option '--lrr'"),
        ({"space": {"optimizer": ["sgd", "adammw"]}}, "optimizer adammw is impossible"),
        ({"space": {"optimizer": ["sgd", "adamw"], "momentum": [0.5]}}, "adamw has no param"),
        ({"objective": {"maximize": "val_acuracy"}}, "unknown objective 'val_acuracy'"),
        ({"space": {"output_dir": ["a"]}}, "trials cannot have the option output_dir"),
        ({"function": "missing.py:f"}, "missing.py"),
    ],
)
def test_nothing_starts_if_the_space_is_wrong(change, message, written, capsys):
    (written / "space.yaml").write_text(json.dumps(SPACE | change))
    assert main(["space.yaml"]) == 1
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert not (written / "runs").exists()


def test_a_trial_that_diverges_is_recorded_and_others_go_on(written, capsys):
    space = SPACE | {"space": {"lr": [1e30, 0.1]}, "sampler": "grid"}
    space.pop("trials")
    (written / "space.yaml").write_text(json.dumps(space))
    assert main(["space.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "trial 0  lr 1e+30  failed: " in lines[1]
    assert "trial 1  lr 0.1  val_accuracy" in lines[2]
    (written / "space.yaml").write_text(json.dumps(space | {"space": {"lr": [1e30]}}))
    assert main(["space.yaml", "--study=failed"]) == 1
    assert "no trial is complete" in capsys.readouterr().err


def test_a_folder_of_another_run_is_not_overwritten(written, capsys):
    other = written / "runs" / "space" / "trial-00000"
    other.mkdir(parents=True)
    (other / "mine").write_text("mine")
    assert main(["space.yaml", "--trials=2"]) == 0
    assert "trial 0 " in (line := capsys.readouterr().out.splitlines()[1])
    assert "failed: " in line
    assert (other / "mine").read_text() == "mine"
    assert [*other.iterdir()] == [other / "mine"]


def test_a_function_is_an_objective(tmp_path):
    def parabola(trial: Trial) -> float | dict[str, float]:
        if trial.number == 1:
            raise RuntimeError("out of luck")
        if trial.number == 2:
            return {"z": 1.0}
        return float((trial.values["x"] - 0.5) ** 2)

    space = {"x": {"low": 0.0, "high": 1.0}}
    options: dict[str, Any] = {"objective": {"minimize": "y"}, "trials": 12, "show": None}
    study = run(parabola, space, tmp_path, **options)
    assert study.best_value < 0.01
    reasons = [one.user_attrs["reason"] for one in study.trials if one.state.name == "FAIL"]
    assert reasons[0].startswith("RuntimeError: out of luck")
    assert reasons[1:] == ["search: expected a value of y, got z"]


def test_several_objectives_have_several_best_trials(tmp_path):
    def both(trial: Trial) -> dict[str, float]:
        return {"a": trial.values["x"], "b": -trial.values["x"] * trial.values["good"]}

    space = make_space(
        {"x": {"low": 0.0, "high": 1.0}, "good": [0, 1]},
        objective={"minimize": ["a", "b"]},
        sampler="nsga2",
        trials=10,
    )
    study = run(both, space, tmp_path, show=None)
    assert {one.params["good"] for one in study.best_trials if one.values[0] > 0.2} <= {1}


def test_trials_are_pruned_by_their_epochs(written):
    pruner = {"name": "median", "n_startup_trials": 1, "n_warmup_steps": 0}
    space = make_space(**(SPACE | {"pruner": pruner, "fixed": FIXED | {"epochs": 3}, "trials": 8}))
    study = run(None, space, written / "study", show=None)
    pruned = [one for one in study.trials if one.state.name == "PRUNED"]
    assert pruned
    for one in pruned:
        assert len(one.intermediate_values) < 3
        history = json.loads(
            (written / "study" / f"trial-{one.number:05d}/history.json").read_text()
        )
        values = [logs["val_accuracy"] for logs in history]
        assert values == [*one.intermediate_values.values()]
    complete = [one for one in study.trials if one.state.name == "COMPLETE"]
    assert all(len(one.intermediate_values) == 3 for one in complete)


def searched(folder: Path, ranks: int, *options: str) -> Finished:
    if why_not():
        pytest.skip(why_not())
    return launch(ranks, ["-m", "pydtnn", "search", "space.yaml", *options], directory=folder)


def test_groups_of_different_sizes_train_trials_side_by_side(written):
    """Trials that ask for a number of ranks are those of groups with it."""
    sizes = {"ranks_per_trial": [1, 2], "lr": [0.01, 0.1]}
    space = {"space": sizes, "fixed": FIXED, "sampler": "grid"}
    (written / "space.yaml").write_text(json.dumps(space))
    finished = searched(written, 2, "--ranks-per-trial=3")
    assert finished.returncode == 1
    assert finished.stderr == "search: --ranks-per-trial must divide the 2 ranks, got 3\n"
    assert not (written / "runs").exists()
    finished = searched(written, 4, "--ranks-per-trial=1,1,2")
    assert finished.returncode == 0, finished
    assert "2 groups of 1 rank and 1 group of 2 ranks" in finished.stdout
    study = SharedStudy(written / "runs" / "space", make_space(**space)).study
    assert [one.state.name for one in study.trials] == ["COMPLETE"] * 4
    for one in study.trials:
        assert len(one.user_attrs["group"][0]["ranks"]) == one.params["ranks_per_trial"]
    points = {(one.params["ranks_per_trial"], one.params["lr"]) for one in study.trials}
    assert points == {(1, 0.01), (1, 0.1), (2, 0.01), (2, 0.1)}


@each(
    ("sizes", "message"),
    [
        ([1, 3], "must have a sum that divides the 6 ranks, got 1,3"),
        ([1, 1], "ranks_per_trial 2 requires a group of so many ranks"),
    ],
)
def test_groups_that_do_not_fit_are_refused(sizes, message):
    space = make_space({"ranks_per_trial": [1, 2]})
    with pytest.raises(ValueError, match=message):
        check_groups(6, sizes, space)


@pytest.mark.long
def test_the_number_of_ranks_of_a_trial_is_chosen_by_prediction(written):
    finished = searched(written, 2, "--ranks-per-trial=auto", "--trials=1")
    assert finished.returncode == 0, finished
    first, second = finished.stdout.splitlines()[:2]
    found = re.fullmatch(
        r"ranks per trial: (\d); predicted time of the study: (.*) s with 1, .*", first
    )
    assert found
    group = "2 groups of 1 rank" if found[1] == "1" else "1 group of 2 ranks"
    assert f", {group}, " in second


def test_a_study_of_few_trials_has_larger_groups():
    times = {1: 8.0, 2: 5.0, 4: 4.0}
    assert [explain(times, 4, trials)[0] for trials in (1, 2, 4, 100)] == [4, 2, 1, 1]
    told = explain({1: 10.0, 2: 6.25}, 2, 4)[1]
    assert "20.0 s with 1, 25.0 s with 2 (a trial is 1.60 times as fast)" in told


BROKEN = """
def f(trial):
    if trial.number == 1 and trial.comm.rank == 1:
        raise RuntimeError("one rank alone")
    trial.comm.barrier()
    return trial.values["x"]
"""


def test_an_error_of_one_rank_ends_the_job_and_is_the_trials_reason(written):
    (written / "f.py").write_text(BROKEN)
    space = {"space": {"x": [1, 2, 3]}, "sampler": "grid", "function": "f.py:f"}
    (written / "space.yaml").write_text(json.dumps(space))
    finished = searched(written, 2, "--ranks-per-trial=2")
    assert finished.returncode != 0
    assert "rank 1: RuntimeError: one rank alone" in finished.stderr
    finished = searched(written, 2, "--ranks-per-trial=2")
    assert finished.returncode == 0, finished
    study = SharedStudy(written / "runs" / "space", make_space(**space)).study
    assert [one.state.name for one in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert "one rank alone" in study.trials[1].user_attrs["reason"]
