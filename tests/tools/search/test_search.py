"""Searches from beginning to end: groups of ranks, failures, interruptions, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pydtnn.tools.search import Trial, make_space, run, training
from pydtnn.tools.search.__main__ import main
from pydtnn.tools.search.lines import best_of
from pydtnn.tools.search.study import SharedStudy
from pydtnn.train import main as train
from pydtnn.utils.errors import AgreedError
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
    assert best_of(space, study.trials) == study.best_trials


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


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_groups_train_trials_side_by_side(size, written):
    space = {"space": {"lr": [0.01, 0.02, 0.1, 0.2]}, "fixed": FIXED, "sampler": "grid"}
    (written / "space.yaml").write_text(json.dumps(space))
    finished = searched(written, 2 * size, f"--ranks-per-trial={size}")
    assert finished.returncode == 0, finished
    assert f"2 groups of {size} rank" in finished.stdout
    study = SharedStudy(written / "runs" / "space", make_space(**space)).study
    assert [one.state.name for one in study.trials] == ["COMPLETE"] * 4
    groups = {tuple(one.user_attrs["group"][0]["ranks"]) for one in study.trials}
    assert groups == {(*range(size),), (*range(size, 2 * size),)}
    assert {one.params["lr"] for one in study.trials} == {0.01, 0.02, 0.1, 0.2}


def test_a_number_of_ranks_that_is_none_is_refused(tmp_path):
    for wrong in (0, "auto"):
        with pytest.raises(AgreedError, match="ranks_per_trial must be"):
            run(None, make_space({"lr": [0.1]}), tmp_path, ranks_per_trial=wrong)  # type: ignore[arg-type]


def test_a_trial_that_needs_too_much_memory_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "free_memory", lambda: 150e6)
    shape = {"samples": 60, "test_samples": 20, "shape": [64, 64, 3], "classes": 4}
    fixed = {**FIXED, "model": "vgg11", "dataset_options": shape, "epochs": 1}
    fixed.pop("global_batch_size")
    space = make_space({"batch_size": [4, 8]}, fixed=fixed, sampler="grid")
    study = run(None, space, tmp_path / "study", show=None)
    assert [one.state.name for one in study.trials] == ["FAIL", "FAIL"]
    reason = study.trials[0].user_attrs["reason"]
    assert "the trial needs" in reason
    assert "150 MB of its host" in reason
    assert not (tmp_path / "study" / "trial-00000").exists()


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
