"""The command line end to end: serial, on two ranks, resumed, reproduced."""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pydtnn.train import main
from tests.launch import Finished

TINY = [
    "--model=cnn",
    '--dataset-options={"samples": 120, "test_samples": 40, "shape": [12, 12, 1], "classes": 4}',
    "--epochs=2",
    "--global-batch-size=16",
]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_run_leaves_its_configuration_history_checkpoints_and_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([*TINY, f"--output-dir={out}", f"--save={tmp_path / 'w.safetensors'}"]) == 0
    run = json.loads((out / "run.json").read_text())
    assert run["configuration"]["model"] == "cnn"
    assert run["ranks"] == 1
    assert run["threads"] >= 1
    assert json.loads((out / "history.json").read_text())
    with open(out / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert float(rows[1]["loss"]) < float(rows[0]["loss"])
    assert (out / "best.safetensors").exists()
    assert sorted(p.name for p in out.glob("checkpoint-*"))
    assert (tmp_path / "w.safetensors").exists()
    printed = capsys.readouterr().out
    for word in ("images/s", "time in compute", "time in communication", "peak memory", "ranks"):
        assert word in printed


def test_saved_weights_are_evaluated_to_what_training_ended_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "w.safetensors"
    assert main([*TINY, f"--output-dir={tmp_path / 'run'}", f"--save={weights}"]) == 0
    history = json.loads((tmp_path / "run" / "history.json").read_text())
    capsys.readouterr()
    assert main([*TINY, f"--load={weights}", "--evaluate-only"]) == 0
    printed = capsys.readouterr().out
    assert f"accuracy {history[-1]['val_accuracy']:.4f}" in printed
    assert f"loss {history[-1]['val_loss']:.4f}" in printed


def test_a_yaml_file_is_read_and_the_command_line_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*TINY, "--lr=0.02", "--print-config"])
    config = tmp_path / "run.yaml"
    config.write_text(capsys.readouterr().out)
    out = tmp_path / "run"
    assert main([f"--config={config}", "--epochs=1", f"--output-dir={out}"]) == 0
    run = json.loads((out / "run.json").read_text())["configuration"]
    assert (run["lr"], run["epochs"], run["model"]) == (0.02, 1, "cnn")


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for group in ("model and data:", "training:", "optimizer:", "ranks and device:", "output:"):
        assert group in printed
    assert "jsonargparse" not in printed


def test_a_model_and_a_scheme_of_ones_own_are_taken_from_files(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from pydtnn.comm.exchange import AllReduce\n"
        "from pydtnn.layers import Flatten, Linear, Sequential\n"
        "def net(classes, input_shape, hidden=8):\n"
        "    return Sequential(Flatten(), Linear(hidden), Linear(classes))\n"
        "class Mine(AllReduce):\n"
        "    pass\n"
    )
    options = [f"--model={own}:net", '--model-options={"hidden": 5}', f"--scheme={own}:Mine"]
    assert main([*TINY, *options, f"--output-dir={tmp_path / 'run'}"]) == 0


def test_the_default_folder_of_a_run_is_a_new_one_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main([*TINY, "--epochs=1"]) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [
        "cnn-synthetic-1",
        "cnn-synthetic-2",
    ]


def test_two_threads_give_the_same_bytes_twice_and_as_one(tmp_path: Path) -> None:
    digests = set()
    for i, threads in enumerate([2, 2, 1]):
        path = tmp_path / f"{i}.safetensors"
        options = [f"--threads={threads}", f"--save={path}", f"--output-dir={tmp_path / str(i)}"]
        assert main([*TINY, "--augment=crop:1,flip", *options]) == 0
        digests.add(digest(path))
    assert len(digests) == 1


def test_a_stopped_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    common = [*TINY, "--augment=flip", "--checkpoint-steps=3", "--keep=20"]
    assert main([*common, f"--output-dir={whole}", f"--save={tmp_path / 'a.safetensors'}"]) == 0
    checkpoints = sorted(whole.glob("checkpoint-*"))
    part.mkdir()
    checkpoints[2].rename(part / checkpoints[2].name)
    resume = [f"--output-dir={part}", "--resume", f"--save={tmp_path / 'b.safetensors'}"]
    assert main([*common, *resume]) == 0
    assert digest(tmp_path / "a.safetensors") == digest(tmp_path / "b.safetensors")
    histories = [json.loads((d / "history.json").read_text()) for d in (whole, part)]
    assert histories[0] == histories[1]


def test_two_ranks_train_and_report_once(tmp_path: Path, mpiexec: Callable[..., Finished]) -> None:
    digests = set()
    for i in range(2):
        save = tmp_path / f"{i}.safetensors"
        options = [f"--save={save}", f"--output-dir={tmp_path / str(i)}"]
        done = mpiexec(2, ["-m", "pydtnn.train", *TINY, *options])
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert done.stdout.count("images/s") >= 1
        assert done.stdout.count("time in communication") == 1
        assert "ranks" in done.stdout
        digests.add(digest(save))
        assert json.loads((tmp_path / str(i) / "run.json").read_text())["ranks"] == 2
    assert len(digests) == 1


def test_the_module_runs_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pydtnn.train", *TINY, "--epochs=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "cnn-synthetic-1" / "run.json").exists()
