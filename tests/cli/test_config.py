"""A configuration refuses what cannot be, whoever made it."""

from dataclasses import FrozenInstanceError, asdict

import pytest

from pydtnn.cli.config import TrainConfig
from tests.each import each


def test_the_defaults_are_what_the_readme_promises():
    config = TrainConfig()
    assert (config.model, config.dataset, config.output_dir) == ("resnet44", "synthetic", None)
    assert config.graph


LIMITED = {"recompute": "auto", "memory_limit": "1GiB"}
STAGES, EXACT = {"parallel": "data=2,pipeline=2"}, {"exact": True, "global_batch_size": 8}
RING = {"allreduce": "ring", "device": "cuda"}


@each(
    ("values", "words"),
    [
        ({"lr": "0.1"}, "--lr must be a number, got '0.1'"),
        ({"label_smoothing": 1}, "--loss label_smoothing must be at least 0 and below 1, got 1"),
        ({"model": 44}, "--model must be text, got 44"),
        ({"download": 1}, "--download must be true or false, got 1"),
        ({"tf32": 1}, "--device tf32 must be true or false, got 1"),
        # what does not go together
        ({"warmup_epochs": 4}, "--warmup-epochs must be below --epochs 4, got 4"),
        ({"evaluate_only": True}, "--evaluate-only requires --load or --resume"),
        ({"comm": "nccl"}, "--comm nccl requires --device cuda"),
        ({"cuda_aware": True, "comm": "mpi"}, "cuda_aware requires --device cuda --comm mpi"),
        ({"cuda_aware": True, "device": "cuda"}, "cuda_aware requires --device cuda --comm mpi"),
        (RING, "--allreduce ring with --device cuda requires --comm mpi"),
        (RING | {"comm": "mpi", "cuda_aware": True}, "combined with --allreduce ring; omit one"),
        ({"tf32": True, "device": "numpy"}, "--device tf32 requires --device cuda --dtype float32"),
        ({"tf32": True, "device": "cuda", "dtype": "bfloat16"}, "requires --device cuda --dtype"),
        ({"shards": 3}, "--exact shards requires --exact"),
        ({"lr_base_batch": 32}, "--lr-scaling base_batch requires --lr-scaling"),
        ({"plateau_factor": 0.5}, "--schedule plateau_factor requires --schedule plateau"),
        ({"tensorboard_histograms": 2}, "--tensorboard histograms requires --tensorboard"),
        ({"plan": "filter"}, "--plan requires --parallel"),
        ({"checkpoint_every": "5min", "checkpoint_steps": 3}, "with --checkpoint-every steps"),
        ({"buddy_interval": "2 epochs", "survive": True}, "must be a time, steps or auto, got"),
        ({"parallel": "auto", "plan": "filter"}, "--plan cannot be combined with --parallel auto"),
        # features of training, as a trainer refuses them
        (STAGES | {"accumulation": 2}, "pipeline=2 cannot be combined with --accumulation; use"),
        (STAGES | {"sync_batch_norm": True}, "with --sync-batch-norm; use fewer micro-batches"),
        (STAGES | {"dtype": "float16"}, "combined with --dtype float16; use bfloat16"),
        (STAGES | EXACT | {"micro_batches": 4}, "with --parallel micro_batches; choose the"),
        (EXACT | {"accumulation": 2}, "--exact cannot be combined with --accumulation; use more"),
    ],
)
def test_values_that_cannot_be_or_do_not_go_together_are_refused_by_name(values, words):
    with pytest.raises((TypeError, ValueError), match="^train: ") as error:
        TrainConfig(**values)
    assert words in str(error.value)


@each(
    "values",
    [
        {"device": "cuda", "tf32": True, "comm": "nccl", "graph": False},
        {"device": "cuda", "comm": "mpi", "cuda_aware": True, "dtype": "float16"},
        {"device": "cuda", "comm": "mpi", "allreduce": "ring", "compress": "sign"},
        {"lr": None, "momentum": 0, "weight_decay": 0, "metrics": "", "augment": ""},
        {"resume": True, "output_dir": "run", "warmup_epochs": 2.5, "straggler_factor": 0},
        {"evaluate_only": True, "load": "w.safetensors", "load_options": {"strict": False}},
        {"shards": 3, "exact": True, "global_batch_size": 8, "checkpoint_every": "5min"},
        {"lr_base_batch": 32, "lr_scaling": "sqrt", "plateau_factor": 0.5, "plateau": 1},
    ],
)
def test_what_can_be_is_taken(values):
    config = asdict(TrainConfig(**values))
    assert {name: config[name] for name in values} == values


def test_the_course_of_training_knows_no_paths_ranks_or_threads():
    config = TrainConfig(data_dir="data", output_dir="run", threads=3, lr=0.5)
    course = config.course()
    assert course["lr"] == 0.5
    assert not {"data_dir", "output_dir", "save", "load", "threads", "scheme"} & set(course)


def test_a_configuration_does_not_change_and_shares_no_options():
    first = TrainConfig()
    with pytest.raises(FrozenInstanceError):
        first.lr = 0.1  # type: ignore[misc]
    first.model_options["shortcut"] = "A"
    assert TrainConfig().model_options == {}
