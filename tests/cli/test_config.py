"""A configuration refuses what cannot be, whoever made it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict
from typing import Any

import pytest

from pydtnn.cli.config import TrainConfig, flags
from tests.each import each


def test_the_defaults_are_what_the_readme_promises() -> None:
    config = TrainConfig()
    assert (config.model, config.dataset, config.output_dir) == ("resnet44", "synthetic", None)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        TrainConfig().lr = 0.1  # type: ignore[misc]


@each(
    ("name", "value", "words"),
    [
        ("epochs", 0, "--epochs must be at least 1, got 0"),
        ("epochs", 1.5, "--epochs must be a whole number, got 1.5"),
        ("epochs", True, "--epochs must be a whole number, got True"),
        ("epochs", None, "--epochs must be a whole number, got None"),
        ("lr", -0.1, "--lr must be above 0, got -0.1"),
        ("lr", float("nan"), "--lr must be above 0, got nan"),
        ("lr", "0.1", "--lr must be a number, got '0.1'"),
        ("label_smoothing", 1, "--label-smoothing must be at least 0 and below 1, got 1"),
        ("model", 44, "--model must be text, got 44"),
        ("save", "", "--save must not be empty"),
        ("download", 1, "--download must be true or false, got 1"),
        ("model_options", "A", '--model-options must be names and values, such as {"name": 1}'),
        ("dtype", "float8", "unknown value of --dtype 'float8'; did you mean 'float64'"),
        ("tf32", 1, "--tf32 must be true or false, got 1"),
        ("warmup_epochs", 4, "--warmup-epochs must be below --epochs 4, got 4"),
        ("resume", True, "--resume requires the folder"),
        ("evaluate_only", True, "--evaluate-only requires weights"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name: str, value: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        TrainConfig(**{name: value})
    assert words in str(error.value)


@each(
    ("values", "words"),
    [
        ({"comm": "nccl"}, "--comm nccl requires --device cuda"),
        ({"cuda_aware": True, "comm": "mpi"}, "--cuda-aware requires --device cuda"),
        ({"cuda_aware": True, "device": "cuda"}, "--cuda-aware requires --comm mpi"),
        (
            {"allreduce": "ring", "device": "cuda"},
            "--allreduce ring with --device cuda requires --comm mpi: NCCL has its own allreduce",
        ),
        (
            {"allreduce": "ring", "device": "cuda", "comm": "mpi", "cuda_aware": True},
            "--allreduce ring cannot be combined with --cuda-aware: it sums in host memory",
        ),
        ({"tf32": True, "device": "numpy"}, "--tf32 requires --device cuda"),
        ({"shards": 3}, "--shards requires --exact"),
        ({"stage": "local", "dataset": "folder"}, "--stage requires --dataset shards"),
        ({"lr_base_batch": 32}, "--lr-base-batch requires --lr-scaling"),
        ({"plateau_factor": 0.5}, "--plateau-factor requires --plateau"),
        (
            {"tf32": True, "device": "cuda", "dtype": "bfloat16"},
            "--tf32 requires --dtype float32, got bfloat16",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="^train: ") as error:
        TrainConfig(**values)
    assert words in str(error.value)


@each(
    "values",
    [
        {"device": "cuda", "tf32": True, "comm": "nccl", "graph": False},
        {"device": "cuda", "comm": "mpi", "cuda_aware": True, "dtype": "float16"},
        {"device": "cuda", "comm": "mpi", "allreduce": "ring", "compress": "sign"},
        {"tf32": False, "graph": False, "comm": "mpi"},
        {"lr": None, "momentum": 0, "weight_decay": 0},
        {"metrics": "", "augment": ""},
        {"resume": True, "output_dir": "run"},
        {"evaluate_only": True, "load": "w.safetensors"},
        {"warmup_epochs": 2.5},
        {"shards": 3, "exact": True, "global_batch_size": 8},
        {"lr_base_batch": 32, "lr_scaling": "sqrt"},
        {"plateau_factor": 0.5, "plateau": 2},
        {"load_options": {"strict": False}, "load": "w.safetensors"},
    ],
)
def test_what_can_be_is_taken(values: dict[str, Any]) -> None:
    config = asdict(TrainConfig(**values))
    assert {name: config[name] for name in values} == values


def test_the_course_of_training_knows_no_paths_ranks_or_threads() -> None:
    config = TrainConfig(data_dir="data", output_dir="run", threads=3, lr=0.5)
    course = config.course()
    assert course["lr"] == 0.5
    assert not {"data_dir", "output_dir", "save", "load", "threads", "scheme"} & set(course)


def test_every_option_says_what_it_is() -> None:
    for name, own in flags(TrainConfig).items():
        assert own.help, name
        assert own.help.strip().rstrip(".") == own.help, name
        own.check(own.default)


def test_two_configurations_share_no_options() -> None:
    first = TrainConfig()
    first.model_options["shortcut"] = "A"
    assert TrainConfig().model_options == {}


@each("factor", [0.5, 0.99])
def test_a_factor_that_would_name_ranks_that_are_not_slow_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="--straggler-factor must be 0 or at least 1, got 0"):
        TrainConfig(straggler_factor=factor)
    assert TrainConfig(straggler_factor=0).straggler_factor == 0


@each(
    ("others", "why"),
    [
        ({"straggler_factor": 0.0}, "--straggler-factor 0, which measures no times"),
        ({"recompute": "auto", "memory_limit": "1GiB"}, "--memory-limit, as the parts of ranks"),
        ({"device": "cuda"}, "--device cuda"),
    ],
)
def test_parts_by_speed_need_measured_times_and_memory(others: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"^train: --balance cannot be combined with {why}"):
        TrainConfig(balance=True, **others)
