"""Searches from beginning to end: groups of ranks, failures, interruptions, the command."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pydtnn.search import Trial, make_space, run
from pydtnn.search.__main__ import main
from pydtnn.search.groups import check_groups, explain
from pydtnn.search.study import REASON, SharedStudy
from pydtnn.train import main as train
from pydtnn.utils.errors import AgreedError
from tests.each import each
from tests.launch import Program, why_not
from tests.ranks import rank_processes, wait_for

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


HALVED = SPACE | {
    "pruner": {"name": "asha", "min_resource": 1, "reduction_factor": 2},
    "fixed": FIXED | {"epochs": 6},
}


def stored(folder: Path, space: dict[str, Any] = SPACE) -> list[Any]:
    return results(SharedStudy(folder, make_space(**space)).study)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `SPACE` in space.yaml, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(json.dumps(SPACE))
    return tmp_path


def test_trials_are_runs_of_training(written: Path, capsys: Capture) -> None:
    assert main(["space.yaml", "--export", "best.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "search: 5 trials of 3 options, 1 group of 1 rank, study runs/space"
    assert [line.split("  ")[0] for line in lines[1:6]] == [f"{n}/5" for n in range(1, 6)]
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


def test_the_same_command_continues_with_more_trials(written: Path, capsys: Capture) -> None:
    assert main(["space.yaml", "--trials=2"]) == 0
    before = stored(written / "runs" / "space")
    assert main(["space.yaml", "--trials=3"]) == 0
    assert stored(written / "runs" / "space")[:2] == before
    assert capsys.readouterr().out.count("\n3/3  trial 2 ") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"space": {"lrr": [0.1]}}, "train: unknown option '--lrr'"),
        ({"space": {"batch_size": [8, 0]}}, "train: --batch-size must be at least 1, got 0"),
        (
            {"space": {"optimizer": ["sgd", "adammw"]}},
            "optimizer adammw is impossible: train: unkn",
        ),
        (
            {"space": {"schedule": ["constant", "cosin"]}},
            "did you mean 'cosine' or 'cosine_restarts'",
        ),
        ({"space": {"scheme": ["gossp"]}}, "unknown scheme 'gossp'"),
        ({"space": {"allreduce": ["rule", "rong"]}}, "unknown allreduce 'rong'"),
        (
            {"space": {"loss": ["cross_entropy", "mse"]}},
            "loss mse is impossible: unknown objective",
        ),
        (
            {"space": {"model_options": [{"hiden": 3}]}},
            "unknown option of mlp 'hiden'; did you mean",
        ),
        ({"space": {"momentum": [0.9, 1.5]}}, "--momentum must be at least 0 and below 1, got 1.5"),
        (
            {"space": {"dataset": ["synthetic", "mnisst"]}},
            "unknown data set 'mnisst'; did you mean",
        ),
        (
            {"space": {"optimizer": ["sgd", "adamw"], "momentum": [0.5]}},
            "optimizer adamw, momentum 0.5 is impossible: train: --momentum: adamw has no param",
        ),
        ({"objective": {"maximize": "val_acuracy"}}, "unknown objective 'val_acuracy'; did you"),
        ({"space": {"output_dir": ["a"]}}, "trials cannot have the option output_dir"),
        ({"sampler": "tpee"}, "unknown sampler 'tpee'"),
        ({"function": "missing.py:f"}, "missing.py"),
    ],
)
def test_nothing_starts_if_the_space_is_wrong(
    change: dict[str, Any], message: str, written: Path, capsys: Capture
) -> None:
    (written / "space.yaml").write_text(json.dumps(SPACE | change))
    assert main(["space.yaml"]) == 1
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert not (written / "runs").exists()


def test_a_trial_that_diverges_is_recorded_and_others_go_on(written: Path, capsys: Capture) -> None:
    space = SPACE | {"space": {"lr": [1e30, 0.1]}, "sampler": "grid"}
    space.pop("trials")
    (written / "space.yaml").write_text(json.dumps(space))
    assert main(["space.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "trial 0  lr 1e+30  failed: " in lines[1]
    assert "trial 1  lr 0.1  val_accuracy" in lines[2]


def test_no_trial_that_is_complete_is_an_error(written: Path, capsys: Capture) -> None:
    (written / "space.yaml").write_text(json.dumps(SPACE | {"space": {"lr": [1e30]}, "trials": 1}))
    assert main(["space.yaml"]) == 1
    assert "no trial is complete" in capsys.readouterr().err


def test_a_folder_of_another_run_is_not_overwritten(written: Path, capsys: Capture) -> None:
    other = written / "runs" / "space" / "trial-00000"
    other.mkdir(parents=True)
    (other / "mine").write_text("mine")
    assert main(["space.yaml", "--trials=2"]) == 0
    assert "trial 0 " in (line := capsys.readouterr().out.splitlines()[1])
    assert "failed: " in line
    assert (other / "mine").read_text() == "mine"
    assert [*other.iterdir()] == [other / "mine"]


def test_trials_are_pruned_by_their_epochs(written: Path) -> None:
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


def parabola(trial: Trial) -> float:
    if trial.number == 1:
        raise RuntimeError("out of luck")
    return float((trial.values["x"] - 0.5) ** 2)


def test_a_function_is_an_objective(tmp_path: Path) -> None:
    space = {"x": {"low": 0.0, "high": 1.0}}
    options: dict[str, Any] = {"objective": {"minimize": "y"}, "trials": 12, "show": None}
    study = run(parabola, space, tmp_path, **options)
    assert study.best_value < 0.01
    assert [one.state.name for one in study.trials].count("FAIL") == 1
    assert study.trials[1].user_attrs["reason"].startswith("RuntimeError: out of luck")


def test_several_objectives_have_several_best_trials(tmp_path: Path) -> None:
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
    with pytest.raises(AgreedError, match="must divide the 1 ranks"):
        run(both, space, tmp_path / "other", ranks_per_trial=2, show=None)


def test_a_function_that_returns_other_names_is_an_error(tmp_path: Path) -> None:
    study = run(lambda trial: {"z": 1.0}, {"x": [1]}, tmp_path, trials=1, show=None)
    assert study.trials[0].user_attrs["reason"] == "search: expected a value of val_accuracy, got z"


COMMAND = ["-m", "pydtnn.search", "space.yaml"]


def started(folder: Path, ranks: int, *options: str) -> Program:
    if why_not():
        pytest.skip(why_not())
    return Program(ranks, [*COMMAND, *options], directory=folder)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_groups_of_ranks_share_the_trials(size: int, written: Path) -> None:
    with started(written, 4, f"--ranks-per-trial={size}") as program:
        assert program.wait(120)
        finished = program.finished()
    assert finished.returncode == 0, finished
    assert f"{4 // size} groups of {size} rank" in finished.stdout
    study = SharedStudy(written / "runs" / "space", make_space(**SPACE)).study
    assert [one.state.name for one in study.trials] == ["COMPLETE"] * 5
    groups = [tuple(one.user_attrs["group"][0]["ranks"]) for one in study.trials]
    assert len({*groups}) > 1
    assert all(len(one) == size for one in groups)
    command = "  mpirun -np 2 python -m pydtnn.train" if size > 1 else "  python -m pydtnn.train"
    assert command in finished.stdout


def test_groups_of_different_sizes_train_trials_side_by_side(written: Path) -> None:
    """Trials that ask for a number of ranks are those of groups with it."""
    sizes = {"ranks_per_trial": [1, 2], "lr": [0.01, 0.1]}
    space = {"space": sizes, "fixed": FIXED, "sampler": "grid"}
    (written / "space.yaml").write_text(json.dumps(space))
    with started(written, 4, "--ranks-per-trial=1,1,2") as program:
        assert program.wait(120)
        finished = program.finished()
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
        ([4], "must divide the 6 ranks, got 4"),
        ([1, 1], "ranks_per_trial 2 requires a group of so many ranks"),
    ],
)
def test_groups_that_do_not_fit_are_refused(sizes: list[int], message: str) -> None:
    space = make_space({"ranks_per_trial": [1, 2]})
    with pytest.raises(ValueError, match=message):
        check_groups(6, sizes, space)


@pytest.mark.long
def test_the_number_of_ranks_of_a_trial_is_chosen_by_prediction(written: Path) -> None:
    with started(written, 2, "--ranks-per-trial=auto", "--trials=1") as program:
        assert program.wait(120)
        finished = program.finished()
    assert finished.returncode == 0, finished
    first, second = finished.stdout.splitlines()[:2]
    found = re.fullmatch(
        r"ranks per trial: (\d); predicted time of the study: (.*) s with 1, .*", first
    )
    assert found
    group = "2 groups of 1 rank" if found[1] == "1" else "1 group of 2 ranks"
    assert f", {group}, " in second


def test_a_study_of_few_trials_has_larger_groups() -> None:
    times = {1: 8.0, 2: 5.0, 4: 4.0}
    assert [explain(times, 4, trials)[0] for trials in (1, 2, 4, 100)] == [4, 2, 1, 1]
    assert (
        "20.0 s with 1, 25.0 s with 2 (a trial is 1.60 times as fast)"
        in explain({1: 10.0, 2: 6.25}, 2, 4)[1]
    )


def test_ranks_that_cannot_be_grouped_are_refused_once(written: Path) -> None:
    with started(written, 3, "--ranks-per-trial=2") as program:
        assert program.wait(60)
        finished = program.finished()
    assert finished.returncode == 1
    assert finished.stderr == "search: --ranks-per-trial must divide the 3 ranks, got 2\n"
    assert not (written / "runs").exists()


BROKEN = """
def f(trial):
    if trial.number == 1 and trial.comm.rank == 1:
        raise RuntimeError("one rank alone")
    trial.comm.barrier()
    return trial.values["x"]
"""


def test_an_error_of_one_rank_ends_the_job_and_is_the_trials_reason(written: Path) -> None:
    (written / "f.py").write_text(BROKEN)
    space = {"space": {"x": [1, 2, 3]}, "sampler": "grid", "function": "f.py:f"}
    (written / "space.yaml").write_text(json.dumps(space))
    with started(written, 2, "--ranks-per-trial=2") as program:
        assert program.wait(60)
        assert program.finished().returncode not in (0, None)
        assert "rank 1: RuntimeError: one rank alone" in program.finished().stderr
    with started(written, 2, "--ranks-per-trial=2") as program:
        assert program.wait(60)
        finished = program.finished()
    assert finished.returncode == 0, finished
    study = SharedStudy(written / "runs" / "space", make_space(**space)).study
    assert [one.state.name for one in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert "one rank alone" in study.trials[1].user_attrs["reason"]


def interrupted(
    folder: Path, kills: int, begin: Callable[[], Any], kill: Callable[[Any], None]
) -> int:
    """Start a search and end it at random moments, so often; return its last status.

    The moments begin when a program has started: trials that never come further are given up.
    """
    generator, begun = random.Random(folder.name), time.monotonic()
    subprocess.run([sys.executable, "-c", "import optuna, pydtnn.train"], check=True)
    start = time.monotonic() - begun
    while True:
        process = begin()
        try:
            return int(process.wait(start + generator.uniform(0, 3.3) if kills else 120))
        except subprocess.TimeoutExpired:
            kill(process)
            process.wait()
            kills -= 1


@pytest.mark.long
@pytest.mark.parametrize("space", [SPACE, HALVED], ids=["whole trials", "parts"])
def test_an_interrupted_search_ends_with_the_same_trials(
    space: dict[str, Any], written: Path
) -> None:
    (written / "space.yaml").write_text(json.dumps(space))
    assert main(["space.yaml", "--study=whole"]) == 0
    ends = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    command = [sys.executable, *COMMAND, "--study=parts"]
    status = interrupted(
        written,
        6,
        lambda: subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
        lambda process: process.send_signal(ends[process.pid % 3]),
    )
    assert status == 0
    assert stored(written / "parts", space) == stored(written / "whole", space)


@pytest.mark.long
@pytest.mark.parametrize("pruner", ["none", "asha"])
def test_no_trial_is_lost_or_counted_twice_when_ranks_are_killed(
    pruner: str, written: Path
) -> None:
    lr = {"low": 1e-3, "high": 0.1, "log": True}  # none of them diverges
    space: dict[str, Any] = {"space": {"lr": lr}, "fixed": FIXED | {"epochs": 20}, "trials": 12}
    space["pruner"] = pruner
    (written / "space.yaml").write_text(json.dumps(space))
    generator = random.Random(3)
    for _ in range(3):
        with started(written, 4, "--ranks-per-trial=2") as program:
            wait_for(lambda: "  trial " in program.finished().stdout, 300)
            os.kill(rank_processes(program)[generator.randrange(4)], signal.SIGKILL)
            assert program.wait(300)
    with started(written, 4, "--ranks-per-trial=2") as program:
        assert program.wait(600)
        assert program.finished().returncode == 0
    study = SharedStudy(written / "runs/space", make_space(**space)).study
    assert [one.number for one in study.trials] == [*range(12)]
    assert [one.user_attrs[REASON] for one in study.trials if REASON in one.user_attrs] == []
    states = [one.state.name for one in study.trials]
    assert {*states} == ({"COMPLETE", "PRUNED"} if pruner == "asha" else {"COMPLETE"})
    for one in study.trials:
        assert [*one.intermediate_values] == [*range(1, len(one.intermediate_values) + 1)]


@pytest.mark.long
def test_jobs_share_a_study(written: Path) -> None:
    command = [sys.executable, *COMMAND]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    lines = [line for text in told for line in text.splitlines() if "  trial " in line]
    assert len([line for line in lines if not line.startswith("best")]) == 5


def test_a_search_that_was_interrupted_says_where_it_continues(written: Path) -> None:
    def fail(trial: Trial) -> float:
        for epoch in range(1, 4):
            trial.report(0.5, epoch)
            if trial.number == 1 and epoch == 2 and not trial.resumed:
                raise KeyboardInterrupt  # as if its job ended
        return 0.5

    lines: list[str] = []
    space = make_space({"x": {"low": 0.0, "high": 1.0}}, trials=3)
    with pytest.raises(KeyboardInterrupt):
        run(fail, space, "runs/own", show=lines.append)
    assert not [line for line in lines if line.startswith("continuing")]
    run(fail, space, "runs/own", show=lines.append)
    told = [line for line in lines if line.startswith("continuing")]
    assert told == ["continuing: 1/3 trials have ended; in progress: trial 1 after epoch 2"]
    assert [line.split("  ")[1] for line in lines[-2:]] == ["trial 1", "trial 2"]
