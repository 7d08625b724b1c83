"""Runs as objects."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import numpy as np
import pytest

import pydtnn
from pydtnn.tools.runs import find_runs
from pydtnn.tools.runs.run import read_intervals
from pydtnn.train import main
from pydtnn.utils.files import MAX_TEXT_B
from tests.each import each
from tests.small_run import TINY
from tests.tools.report.folders import EPOCHS, write_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two epochs."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    assert main([*TINY, "--epochs=2", "--quiet", f"--output-dir={folder}"]) == 0
    return folder


def test_a_run_has_what_its_command_has_written(trained):
    run = pydtnn.load_run(trained)
    assert run.configuration["epochs"] == run.planned == run.epochs == 2
    assert run.about["environment"]["pydtnn"] == pydtnn.__version__
    assert (run.state, run.size) == ("finished", 1)
    assert [path.name[:11] for path in run.checkpoints] == ["checkpoint-"] * 2
    assert len(run.intervals) == 2
    assert run.seconds() is not None
    columns = run.columns()
    assert list(columns["epoch"]) == [1, 2]
    assert columns["loss"].dtype == np.float64
    best = run.best()
    assert best == run.best("val_accuracy")
    assert best is not None
    assert best[1] == max(columns["val_accuracy"])


def test_the_model_of_a_run_has_the_best_or_the_last_weights(trained):
    run = pydtnn.load_run(trained)
    best, last = run.model(), run.model("last")
    saved = pydtnn.weights.load_weights(run.model("last"), trained / "best.safetensors")
    assert not saved.missing
    first = run.model(run.checkpoints[0])
    names = [*last.state()]
    assert any((first.state()[name] != last.state()[name]).any() for name in names)
    expected = {1: first, 2: last}[run.best()[0]]  # type: ignore[index]
    for name, array in best.state().items():
        np.testing.assert_array_equal(array, expected.state()[name])
    assert best.inputs is not None  # raw samples are normalised as in training


def test_a_run_that_ended_early_is_finished_and_one_that_is_cut_off_is_not(tmp_path):
    folder = write_run(tmp_path / "a", configuration={"epochs": 9})
    assert pydtnn.load_run(folder).state == "interrupted"
    (folder / "run.json").write_text('{"configuration": {"epochs": 9}, "ended": "now"}')
    assert pydtnn.load_run(folder).state == "finished"


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="this system has no /proc/locks")
def test_a_run_whose_folder_is_locked_is_running(tmp_path):
    folder = write_run(tmp_path / "a", configuration={"epochs": 9})
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert pydtnn.load_run(folder).state == "running"
    finally:
        os.close(descriptor)
    assert pydtnn.load_run(folder).state == "interrupted"


def test_values_that_are_not_finite_are_none_and_nan_and_there_may_be_none(tmp_path):
    folder = write_run(tmp_path / "a")
    run = pydtnn.load_run(folder)
    assert run.history[0]["val_loss"] is None
    assert np.isnan(run.columns()["val_loss"]).all()
    assert run.best("val_loss") is None
    assert len(run.columns()["epoch"]) == EPOCHS
    (folder / "measurements.jsonl").unlink()
    (folder / "history.json").unlink()
    os.mkfifo(folder / "history.json")  # a pipe, which is not waited for
    run = pydtnn.load_run(folder)
    assert (run.epochs, run.best(), run.seconds(), run.checkpoints) == (0, None, None, [])
    assert [*run.columns()] == ["epoch"]


def test_runs_are_found_newest_first_and_to_a_depth(tmp_path):
    for age, name in enumerate(("new", "sub/old", "sub/sub/older")):
        folder = write_run(tmp_path / name)
        os.utime(folder / "run.json", (9 - age, 9 - age))
    (tmp_path / "new" / "copy").symlink_to(tmp_path)
    found = [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path, 2)]
    assert found == ["new", "sub/old"]
    assert find_runs(tmp_path / "nothing") == []


@each(
    ("name", "content", "said"),
    [
        ("run.json", b"[" * 100_000, "run.json is damaged: it cannot be parsed"),
        ("run.json", b'{"a": 1' + b"0" * 5000 + b"}", "run.json is damaged: it cannot be parsed"),
        ("history.json", b"{}", "history.json is damaged: it must contain a list"),
        ("history.json", b"\xff", "history.json is damaged: it cannot be parsed"),
    ],
)
def test_a_damaged_run_is_one_sentence(name, content, said, tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^load_run: .*{said}; give the folder of another run$"):
        pydtnn.load_run(folder)


def without_a_layer(data: bytes) -> bytes:
    content = json.loads(data)
    content["layers"] = content["layers"][:-1]
    content["outputs"] = [content["layers"][-1]["name"]]
    return json.dumps(content).encode()


@each(
    ("name", "change", "weights", "said"),
    [
        ("model.json", None, "best", "contains no model.json, which is written for layers whose"),
        ("best.safetensors", None, "best", "file .*best.safetensors does not exist"),
        ("", None, "last", "contains no checkpoint; use the weights 'best'"),
        ("model.json", lambda data: data[:-9], "best", "^load_run: "),
        ("best.safetensors", lambda data: data[:-9], "best", "^load_run: "),
        ("model.json", without_a_layer, "best", "^load_run: .*does not fit model.json"),
    ],
)
def test_a_model_without_its_files_or_with_damaged_ones_is_one_sentence(
    name, change, weights, said, trained, tmp_path
):
    for file in ("run.json", "history.json", "model.json", "best.safetensors"):
        data = (trained / file).read_bytes()
        if file != name:
            (tmp_path / file).write_bytes(data)
        elif change is not None:
            (tmp_path / file).write_bytes(change(data))
    with pytest.raises((OSError, ValueError), match=said):
        pydtnn.load_run(tmp_path).model(weights)


@each(
    ("name", "values"),
    [
        ("step", [2, 2]),
        ("step", [0, 1]),
        ("seconds", [1, 0]),
        ("samples", [8, np.inf]),
        ("lr", [1]),
    ],
)
def test_intervals_that_cannot_be_are_refused(name, values):
    columns = {"step": [1, 2], "seconds": [1, 1], "samples": [8, 5], "loss": [2, 1], "lr": [1, 1]}
    assert read_intervals(3, columns).step.tolist() == [1, 2]
    with pytest.raises(ValueError, match="must "):
        read_intervals(3, columns | {name: values})


@each("name", ["run.json", "history.json", "measurements.jsonl"])
def test_a_file_that_is_too_large_is_not_read(name, tmp_path):
    folder = write_run(tmp_path / "a")
    os.truncate(folder / name, MAX_TEXT_B + 1)  # without blocks on the disk
    with pytest.raises(ValueError, match=f"^load_run: .*{name} must have at most 268,435,456 B"):
        pydtnn.load_run(folder)
