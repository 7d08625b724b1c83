"""`--parallel auto`, and the prediction in the report of a run."""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

from pydtnn.cli.config import TrainConfig, flags, read_axes
from pydtnn.cli.workload import create_data, describe_data, describe_run
from pydtnn.tools.perfmodel import job, predicted
from pydtnn.tools.perfmodel.platform import FOLDER, Platform
from pydtnn.tools.perfmodel.predicted import MIN_STEPS, Predicted, no_formula, predict
from pydtnn.train import main
from tests.each import each
from tests.small_run import TINY, TRAIN

PREDICTED = (
    r"time per step +measured \S+ ms \(\S+ to \S+\), predicted \S+ ms( \(\S+ to \S+\))?\n"
    r"  prediction +for this job, .*accuracy \d+%, largest difference in \w+"
)


@pytest.fixture(autouse=True)
def predicted_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have few steps, and run beside each other, on a machine that is busy."""
    monkeypatch.setattr(job, "MAX_SPREAD", math.inf)
    monkeypatch.setattr(predicted, "MIN_STEPS", 0)


def test_one_rank_is_predicted_beside_the_measurement(tmp_path, capsys):
    assert main([*TINY, "--parallel=auto", f"--output-dir={tmp_path / 'run'}", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^parallel: serial: \S+ ms per step by the model; limited by ", out, re.M)
    assert re.search(PREDICTED, out)
    for part in ("in compute", "in communication", "waiting for data", "memory of a rank"):
        assert re.search(rf"  {part} +measured \S+", out)
    entry = json.loads((tmp_path / "run" / "run.json").read_text())["predicted"]
    parts = [entry[name] for name in ("compute", "update", "communication", "data")]
    assert entry["seconds"] == pytest.approx(sum(parts))
    assert entry["reason"] == ""


def test_a_run_that_cannot_be_predicted_says_why_and_trains(tmp_path, capsys, monkeypatch):
    options = [*TINY, "--verbose", "--scheme=local_sgd", f"--output-dir={tmp_path / 'run'}"]
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "ms; not predicted: the model of a step has no formula for --scheme local_sgd" in out

    def broken(*_: object) -> None:
        raise ZeroDivisionError("no bandwidth")

    monkeypatch.setattr(job, "predict", broken)
    assert main([*TINY, f"--output-dir={tmp_path / 'other'}", "--verbose"]) == 0
    assert "not predicted: ZeroDivisionError: no bandwidth" in capsys.readouterr().out


def test_quiet_and_short_runs_measure_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path / "cache"))
    options = [*TINY, "--epochs=1", "--steps-per-epoch=2"]
    assert main([*options, "--quiet", f"--output-dir={tmp_path / 'run'}"]) == 0
    assert main([*options, "--tuning=fixed", f"--output-dir={tmp_path / 'fixed'}"]) == 0
    out = capsys.readouterr().out
    assert "not predicted: --tuning fixed measures nothing; name a --platform" in out
    monkeypatch.setattr(predicted, "MIN_STEPS", MIN_STEPS)
    assert main([*options, f"--output-dir={tmp_path / 'other'}"]) == 0
    assert "not predicted: runs of less than 12 steps are not; name" in capsys.readouterr().out
    assert not [*(tmp_path / "cache").glob("platform-*")]


@each("spread, words", [(math.inf, PREDICTED), (-1.0, "not predicted: the machine is busy: ")])
def test_a_short_run_is_predicted_by_ten_of_its_steps(spread, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(predicted, "MIN_STEPS", MIN_STEPS)
    monkeypatch.setattr(predicted, "MAX_SPREAD", spread)
    assert main([*TINY, f"--output-dir={tmp_path / 'run'}", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert re.search(words, out)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["measured"]["seconds"] > 0
    assert (
        (about["predicted"]["seconds"] > 0) == (spread > 0) == (about["predicted"]["reason"] == "")
    )
    if spread > 0:
        assert "for this job, from 10 of its first steps, accuracy" in out


def slow_network(path: Path) -> Path:
    """Fast compute and a slow network, on which gradients of large layers take long."""
    text = (FOLDER / "cpu-1gbit.yaml").read_text()
    text = re.sub(r"bandwidth: 1 Gbit/s|bandwidth: 125 MB/s", "bandwidth: 10 MB/s", text)
    text = re.sub(r"ranks_per_host: \d+", "ranks_per_host: 1", text)
    path.write_text(text)
    assert Platform.load(path).messages.between.bandwidth == 1e7
    return path


@pytest.mark.long
def test_two_ranks_train_with_the_choice_of_rank_0(tmp_path, mpiexec):
    """On a slow network the weights of a large linear layer are cut."""
    platform, folder = slow_network(tmp_path / "slow.yaml"), tmp_path / "run"
    options = ['--model-options={"hidden": [2048, 2048]}', f"--platform={platform}", "--verbose"]
    options = [*TINY, *options]
    run = mpiexec(2, [*TRAIN, *options, "--parallel=auto", f"--output-dir={folder}"])
    assert run.returncode == 0, run.stdout + run.stderr
    chosen = json.loads((folder / "run.json").read_text())["configuration"]
    assert chosen["parallel"] not in (None, "auto")
    assert f"{chosen['parallel'].partition('=')[0]} 2" in run.stdout
    assert "measured" in run.stdout


@each(
    ("option", "words"),
    [
        ("--scheme=gossip", "--parallel auto has no formula for --scheme gossip; name the axes"),
        ("--memory-limit=1MB", "search: expected a memory limit of at least"),
    ],
)
def test_auto_refuses_what_it_cannot_choose(option, words, tmp_path, capsys):
    assert main([*TINY, "--parallel=auto", option, f"--output-dir={tmp_path / 'run'}"]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@each(
    ("options", "found"),
    [
        ({}, ""),
        ({"scheme": "local_sgd"}, "--scheme local_sgd"),
        ({"exact": True, "global_batch_size": 8}, "--exact"),
        ({"accumulation": 2}, ""),
        ({"overlap": False}, "--scheme :overlap=false"),
        ({"freeze": "stem"}, "--freeze stem"),
    ],
)
def test_options_without_a_formula_are_named(options, found):
    config = TrainConfig(**options)
    data = {"input_shape": (8, 8, 1), "classes": 4, "samples": 64, "batch": 8}
    assert no_formula(config, describe_run(config, {}, data)) == found


def test_lines_of_the_report_compare_each_part():
    prediction = Predicted("p", 0.010, 0.006, 0.001, 0.002, 0.001, 5e6)
    measured = {"seconds": 0.0125, "low": 0.012, "high": 0.02, "first": 0.5, "compute": 0.008}
    measured |= {"communication": 0.003, "data": 0.0015, "memory": 6e6}
    found = dict(prediction.rows(measured))
    text = "measured 12.5 ms (12 to 20), predicted 10 ms"
    assert found["time per step"] == text
    assert found["  prediction"] == "for p, accuracy 80%, largest difference in compute"
    other = dict(replace(prediction, communication=0.009, low=0.009, high=0.0125).rows(measured))
    assert other["time per step"] == f"{text} (9 to 12.5)"
    assert other["  prediction"].endswith("largest difference in communication")
    assert found["  first step"].startswith("measured 500 ms")
    assert found["  in compute"].startswith("measured 8 ms, predicted 7 ms, 1 ms of it")
    assert found["  in communication"] == "measured 3 ms, predicted 2 ms"
    assert astuple(Predicted(reason="none")) == ("", *[0.0] * 8, "none", 0)
    assert "measured 6 MB, predicted 5 MB" in found["  memory of a rank"]
    assert prediction.rows({}) == []


# -- every option of a run

DATA = {"samples": 120, "test_samples": 40, "shape": [12, 12, 1], "classes": 4}

BASE: dict[str, Any] = {
    "model": "cnn",
    "dataset_options": DATA,
    "platform": "cpu-1gbit",
    "global_batch_size": 16,
    "epochs": 3,
}

WITH: dict[str, dict[str, Any]] = {
    "model_options": {"model": "mlp"},
    "momentum": {"optimizer": "sgd"},
    "batch_size": {"global_batch_size": None},
    "dataset": {"dataset_options": {}},
    "micro_batches": {"parallel": "data=2,pipeline=2"},
    "pipeline_schedule": {"parallel": "data=2,pipeline=2"},
    "plan": {"parallel": "data=2,filter=2"},
    "recompute": {"model": "resnet8"},
    "memory_limit": {"model": "resnet8", "recompute": "auto"},
    "mtbf": {"checkpoint_every": "auto"},
    "bucket_bytes": {"model": "resnet8"},  # of the CNN, nearly all gradients are in one array
    "compress_options": {"compress": "top_k"},
    "shards": {"exact": True},
    "load_options": {"load": "weights.safetensors"},
    **{name: {"teacher": "run"} for name in ("temperature", "teacher_weight")},
    "evaluate_only": {"load": "weights.safetensors"},
    "resume": {"output_dir": "run"},
    "lr_base_batch": {"lr_scaling": "linear"},
    "plateau_factor": {"plateau": 2},
    "tensorboard_histograms": {"tensorboard": True},
    "trace_steps": {"trace": "trace"},
    "trace_kernels": {"trace": "trace"},
    **{name: {"survive": True} for name in ("min_ranks", "survive_stages")},
    "buddy_interval": {"survive": True},
    "disturb": {"virtual_ranks": 4},
}
"""Options without which another one is refused."""

VALUES: dict[str, Any] = {
    **{"model": "mlp", "model_options": {"hidden": [64]}, "dataset": "digits", "image_size": 8},
    **{"dataset_options": DATA | {"shape": [16, 16, 1]}, "data_dir": "data", "teacher": "run"},
    **{"temperature": 3.0, "teacher_weight": 0.25},
    **{"validation_split": 0.2, "augment": "flip", "mixup": 0.2, "cutmix": 1.0},
    **{"epochs": 4, "steps_per_epoch": 3, "batch_size": 8, "global_batch_size": 32},
    **{"accumulation": 2, "loss": "mse", "loss_options": {"class_weights": "balanced"}},
    **{"auxiliary_weights": "0.3", "label_smoothing": 0.1, "metrics": "top5_accuracy"},
    **{"monitor": "loss", "early_stopping": 3, "stop_at": 0.9, "ema": 0.99, "freeze": "*"},
    **{"shards": 4, "seed": 1, "dtype": "float64", "optimizer": "adam", "lr": 0.1},
    **{"formats": "weights=e2m1:32", "moved": 1},
    **{"momentum": 0.0, "weight_decay": 0.1, "clip_norm": 1.0},
    **{"optimizer_options": {"nesterov": True}, "schedule": "constant"},
    **{"schedule_options": {"rise": 0.3}, "warmup_epochs": 1.0, "lr_scaling": "linear"},
    **{"lr_base_batch": 32, "plateau": 2, "plateau_factor": 0.5},
    **{"scheme": "sharded", "scheme_options": {"overlap": False}, "compress": "float16"},
    **{"compress_options": {"share": 0.1}, "allreduce": "ring", "bucket_bytes": 1 << 21},
    **{"comm": "mpi", "parallel": "data=2,filter=2", "micro_batches": 2},
    **{"pipeline_schedule": "gpipe", "plan": "channel", "device": "numpy", "tf32": True},
    **{"recompute": "auto", "memory_limit": "8GB", "threads": 3, "tuning": "direct"},
    **{"loader_threads": 0, "output_dir": "run", "save": "m.pydtnn", "load": "w.safetensors"},
    **{"load_options": {"strict": False}, "checkpoint_epochs": 2, "checkpoint_steps": 3},
    **{"checkpoint_every": "5min", "mtbf": "1 h", "grace": 30.0},
    **{"keep": 3, "progress": "plain", "check_equal": 7, "tensorboard_histograms": 1},
    **{"mlflow": "digits", "wandb": "digits", "verify_steps": 100},
    **{"min_ranks": 2, "buddy_interval": "5 steps", "survive_stages": "recycle"},
    **{"trace": "trace", "trace_steps": "1:2", "timeout": 60.0, "straggler_factor": 2.0},
    **{"virtual_ranks": 4, "platform": "cpu-10gbit", "disturb": "file"},
}
"""Another value of each option; of switches the other one."""

NEEDS = {"shards": "--exact", "scheme_options": "--scheme: overlap is not", "disturb": "--virtual"}
NEEDS |= dict.fromkeys(["temperature", "teacher_weight"], "--teacher")
"""Options of others, which the prediction refuses."""

NO_EFFECT: dict[str, tuple[str, ...]] = {
    "what is computed, with as many operations": (
        *("loss", "loss_options", "auxiliary_weights", "label_smoothing", "metrics", "seed"),
        *("lr", "weight_decay", "optimizer_options", "schedule", "schedule_options"),
        *("warmup_epochs", "lr_scaling", "lr_base_batch", "plateau", "plateau_factor"),
        *("load", "load_options"),
    ),
    "samples are prepared by other threads, at the rate of the platform": (
        *("skip_bad", "exif_rotation", "augment", "mixup", "cutmix"),
        *("data_dir", "download"),
    ),
    "how many steps there are": (
        *("epochs", "steps_per_epoch", "validation_split", "early_stopping", "stop_at", "monitor"),
        *("evaluate_only", "drop_last"),
    ),
    "happens between steps": (
        *("output_dir", "save", "resume", "checkpoint_epochs", "checkpoint_steps", "keep"),
        *("checkpoint_every", "checkpoint_background", "mtbf", "grace"),
        *("progress", "verbose", "quiet", "check_equal", "tensorboard", "tensorboard_histograms"),
        *("mlflow", "wandb", "verify_steps"),
        *("timeout", "straggler_factor", "balance", "restore_best", "mirrored", "moved"),
        *("survive", "survive_stages", "min_ranks", "buddy_interval"),
    ),
    "observes steps, in less than a percent of their time": (
        *("trace", "trace_steps", "trace_kernels"),
    ),
    "of GPUs, which are not predicted": ("comm", "cuda_aware", "tf32", "graph"),
}
"""Options without effect on the predicted time and memory of a step, and why."""

DECLARED = {name for names in NO_EFFECT.values() for name in names}


def prediction(config: TrainConfig) -> Predicted:
    """Predict a run of four ranks, as the end of its report does."""
    axes = read_axes(config.parallel) or {"data": 4}
    data = describe_data(config, create_data(config)[0], axes["data"])
    work = describe_run(config, axes, data)
    found = predict(config, work, Platform.load(str(config.platform)))
    return replace(found, platform="")


@functools.cache
def base_prediction(name: str) -> Predicted:
    return prediction(TrainConfig(**BASE | WITH.get(name, {})))


@each("name", flags(TrainConfig), few=27)
def test_an_option_changes_the_prediction_has_no_effect_or_is_refused(name):
    """It is refused by the configuration, by the data set, or by the prediction."""
    own, others = flags(TrainConfig)[name], BASE | WITH.get(name, {})
    value = VALUES.get(name, not own.default)
    assert value != others.get(name, own.default)
    try:
        found, refused = prediction(TrainConfig(**others | {name: value})), ""
    except ValueError as error:
        found, refused = Predicted(), str(error)
    base = base_prediction(name if name in WITH else "")
    if refused or found.reason:
        off = own.default is True and not own.owner
        label = own.label.replace("--", "--no-") if off else own.label
        words = [NEEDS.get(name, label), label.replace(" ", " :")]
        assert [word for word in words if word in refused + found.reason]
        assert base.reason == "" or name in NEEDS
    elif name in DECLARED:
        assert found == base
    else:
        assert (found.seconds, found.memory) != (base.seconds, base.memory)


def test_auxiliary_outputs_are_part_of_a_step():
    net = BASE | {"model": "googlenet", "dataset_options": DATA | {"shape": [64, 64, 3]}}
    heads = {"model_options": {"auxiliary": True}, "auxiliary_weights": "0.3,0.3"}
    assert prediction(TrainConfig(**net | heads)).seconds > prediction(TrainConfig(**net)).seconds


def test_more_loader_threads_shorten_the_wait_for_a_slow_loader(tmp_path):
    text = (FOLDER / "cpu-1gbit.yaml").read_text()
    slow = tmp_path / "slow.yaml"
    slow.write_text(re.sub(r"sample: [^\n]+", "sample: 20 ms", text))
    one, two = (
        prediction(TrainConfig(**BASE | {"platform": str(slow), "loader_threads": n}))
        for n in (1, 2)
    )
    assert one.data > two.data > 0
