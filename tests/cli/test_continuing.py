"""`--resume FOLDER`: a run continues with its own options."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.run_directory import EarlierRun, describe_changes, read_run, start_values
from pydtnn.train import main
from tests.each import each
from tests.small_run import TINY, only_line

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Path:
    """A folder in which runs/a is a run of two epochs."""
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "--augment=flip", "--output-dir=runs/a"]) == 0
    capsys.readouterr()
    return tmp_path / "runs"


def history(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "history.json").read_text())


def test_a_run_continues_with_its_own_options_and_lists_those_that_change(runs, capsys):
    assert main(["--resume", "runs/a", "--epochs=4", "--quiet", "--no-verbose"]) == 0
    assert main(["--resume=runs/a", "--epochs=5", "--model-options={}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "changed: --epochs 4 -> 5" in lines
    assert f"continuing from {Path('runs/a/checkpoint-00000032')}" in lines
    assert len(history(runs / "a")) == 5
    configuration = json.loads((runs / "a" / "run.json").read_text())["configuration"]
    assert (configuration["augment"], configuration["global_batch_size"]) == ("flip", 16)


def test_an_interrupted_run_that_continues_gives_the_same_bytes(runs, capsys):
    options = [*TINY, "--augment=flip", "--checkpoint-steps=3", "--keep=20"]
    assert main([*options, "--output-dir=runs/whole", "--save=whole.safetensors"]) == 0
    assert main([*options, "--output-dir=runs/part"]) == 0
    for path in sorted((runs / "part").glob("checkpoint-*"))[2:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    capsys.readouterr()
    assert main(["--resume", "runs/part", "--save=part.safetensors"]) == 0
    printed = capsys.readouterr().out
    assert "changed: --save none -> part.safetensors" in printed
    assert Path("whole.safetensors").read_bytes() == Path("part.safetensors").read_bytes()


def test_a_complete_run_says_so_and_how_to_train_on(runs, capsys):
    before = (runs / "a" / "run.json").read_bytes()
    assert main(["--resume", "runs/a"]) == 0
    *_, sentence, results = capsys.readouterr().out.splitlines()
    assert sentence == "the run is complete: 2 of 2 epochs; add --epochs 4 to train on"
    assert results.startswith(f"loss {history(runs / 'a')[-1]['loss']:.4f}  accuracy ")
    assert (runs / "a" / "run.json").read_bytes() == before


def test_a_run_is_evaluated_with_its_own_options(runs, capsys):
    assert main(["--evaluate-only", "--resume", "runs/a"]) == 0
    last = history(runs / "a")[-1]
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"loss {last['val_loss']:.4f}  accuracy {last['val_accuracy']:.4f}"


def test_without_run_json_the_options_are_those_of_the_checkpoint(runs, capsys):
    (runs / "a" / "run.json").unlink()
    assert main(["--resume", "runs/a", "--epochs=3", "--threads=1"]) == 0
    assert "changed: --epochs 2 -> 3, --threads none -> 1" in capsys.readouterr().out
    assert len(history(runs / "a")) == 3


def test_a_folder_without_a_run_names_the_runs_beside_it_newest_first(runs, capsys):
    for age, name in enumerate(("old", "older"), 1):
        (runs / name).mkdir()
        (runs / name / "run.json").write_text("{}")
        os.utime(runs / name / "run.json", (age, 3 - age))
    (runs / "empty").mkdir()
    listed = "use one of the runs in runs, newest first: runs/a, runs/old, runs/older"
    for folder, what in (("runs/empty", "contains no run"), ("a", "does not exist")):
        assert main(["--resume", folder]) == 1
        assert only_line(capsys.readouterr().err) == f"train: --resume: {folder} {what}; {listed}"


@each(
    ("content", "words"),
    [
        ("{", "is damaged: it cannot be parsed; set the options of the run, and --output-dir"),
        ("[" * 100000, "run.json is damaged: it cannot be parsed"),
        ("[]", "run.json is damaged: it must contain an object; set the options of the run"),
        ('{"configuration": 3}', "contains no options of a run"),
        ('{"configuration": {"new": 3}}', "has the option 'new' of another version"),
        ('{"configuration": {"epochs": "many"}}', "--epochs must be a whole number, got 'many'"),
        ('{"configuration": {"seed": 0}, "ranks": "x", "global_batch_size": 1}', ""),
    ],
)
def test_a_damaged_run_file_is_one_sentence(content, words, runs, capsys):
    (runs / "a" / "run.json").write_text(content)
    assert main(["--resume", "runs/a", "--model=mlp", "--dataset=nothing"]) == 1
    assert words in only_line(capsys.readouterr().err)


def test_weights_of_load_are_replaced_by_those_of_the_checkpoint(runs, capsys):
    load = ["--load=runs/a/best.safetensors", "--load-options.strict=false"]
    assert main([*TINY, *load, "--output-dir=runs/b"]) == 0
    (runs / "a" / "best.safetensors").unlink()
    capsys.readouterr()
    assert main(["--resume=runs/b", "--epochs=3"]) == 0
    printed = capsys.readouterr().out
    assert "changed: --epochs 2 -> 3\n" in printed
    assert "loaded" not in printed


def test_other_ranks_continue_with_the_global_batch_of_the_run():
    run = EarlierRun("runs/a", {"batch_size": 32, "epochs": 5}, 2, 64)
    values = {"batch_size": 32, "epochs": 5, "resume": True, "output_dir": "runs/a"}
    assert start_values(run, set(), 2) == values
    assert start_values(run, set(), 4) == values | {"global_batch_size": 64}
    assert start_values(run, {"batch_size"}, 4) == values
    fixed = EarlierRun("runs/a", {"global_batch_size": 64}, 2, 64)
    assert "global_batch_size" not in start_values(fixed, {"batch_size"}, 2)


def test_options_that_each_command_sets_are_not_changes():
    run = EarlierRun("a", {"epochs": 3})
    same = TrainConfig(epochs=3, resume=True, output_dir="a", verbose=True, progress="plain")
    assert describe_changes(run, same) == ""
    other = TrainConfig(epochs=3, lr=0.5, overlap=False, model_options={"a": "b"})
    assert describe_changes(run, other) == (
        "--model options {} -> {a: b}, --lr none -> 0.5, --scheme overlap true -> false"
    )


def test_options_of_earlier_versions_without_effect_on_training_are_left_out(tmp_path):
    configuration = {"epochs": 3, "mlperf_log": "log.txt"}
    content = {"configuration": configuration, "ranks": 2, "global_batch_size": 64}
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert read_run(str(tmp_path)) == EarlierRun(str(tmp_path), {"epochs": 3}, 2, 64)
