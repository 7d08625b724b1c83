"""What a configuration names becomes objects, those of a user's own files too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pydtnn.cli.build import Job, create_job
from pydtnn.cli.config import TrainConfig
from pydtnn.comm import create_communicator
from pydtnn.schedules import WarmUp

Make = Callable[..., Job]
HEADS = {"model": "own.py:two_heads"}

OWN = """
import numpy as np
from pydtnn.data import ArrayDataset
from pydtnn.layers import Linear
from pydtnn.losses import CategoricalCrossEntropy
from pydtnn.metrics import Accuracy
from pydtnn.models.auxiliary import Heads
from pydtnn.optimizers import Optimizer

number = 3

def halves(step):
    return 0.5**step

def points(samples=20, seed=0):
    x = np.random.default_rng(seed).normal(size=(samples, 4))
    train = ArrayDataset(x, np.arange(samples) % 3)
    return train, ArrayDataset(x, train.y, like=train)

def one_set():
    return points()[0]

class Lion(Optimizer):
    slots = ("average",)

    def __init__(self, lr=0.003, beta=0.9, **options):
        super().__init__(lr, **options)
        self.beta = beta

    def update(self, w, g, average, *, lr, decay, step):
        w -= lr * (np.sign(self.beta * average + (1 - self.beta) * g) + decay * w)
        average += 0.01 * (g - average)

class NeedsARate(Lion):
    def __init__(self, lr):
        super().__init__(lr)

class Focal(CategoricalCrossEntropy):
    pass

class Own(Accuracy):
    name = "own"

ready = Focal(0.2)

def focal():
    return Focal(0.3)

def two_heads(classes, input_shape):
    heads = {"a": Linear(classes, name="early"), "b": Linear(classes, name="late")}
    parts = (Linear(8, name="a"), Linear(8, name="b"), Linear(classes, name="c"))
    return Heads(*parts, heads=heads)
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make jobs in a folder that holds own.py."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    def make(**options: Any) -> Job:
        usual = {"model": "mlp", "dataset": "own.py:points", "batch_size": 5, "epochs": 1}
        config = TrainConfig(**usual | options)
        return create_job(config, create_communicator("serial"), 1, tmp_path)

    return make


def test_a_data_set_of_ones_own_takes_its_options(make):
    job = make(dataset_options={"samples": 30})
    assert (len(job.train), job.train.classes, job.steps_per_epoch) == (30, 3, 6)
    assert job.validation.like is job.train
    assert make(save="m.pydtnn").trainer.model.inputs  # is saved if it is only evaluated, too
    assert not make(save="w.safetensors").trainer.model.inputs


def test_a_loss_and_metrics_of_ones_own_stand_beside_those_of_the_library(make):
    trainer = make(loss="own.py:Focal", metrics="accuracy, own.py:Own", monitor="val_own").trainer
    assert type(trainer.objective.losses[0]).__name__ == "Focal"
    assert [metric.name for metric in trainer.objective.metrics[0]] == ["accuracy", "own"]


def test_a_loss_may_be_a_class_an_object_or_a_function_and_is_smoothed_if_it_takes_that(make):
    for name, given, smoothing in (("Focal", 0.1, 0.1), ("ready", 0.0, 0.2), ("focal", 0.0, 0.3)):
        (loss,) = make(loss=f"own.py:{name}", label_smoothing=given).trainer.objective.losses
        assert (type(loss).__name__, loss.label_smoothing) == ("Focal", smoothing)


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ([1, 2, 0.5], {0: 1, 1: 2, 2: 0.5}),
        ({"1": 2}, {1: 2}),
        ("balanced", {0: 20 / 21, 1: 20 / 21, 2: 20 / 18}),
    ],
)
def test_a_loss_takes_its_options_and_weights_that_balance_the_training_set(given, weights, make):
    options = {"loss_options": {"class_weights": given}, "dataset_options": {"samples": 20}}
    (loss,) = make(**options).trainer.objective.losses
    assert loss.class_weights.weights == pytest.approx(weights)


def test_auxiliary_outputs_are_trained_with_their_weights(make):
    job = make(model="own.py:two_heads", auxiliary_weights="0.3, 0.2")
    assert job.trainer.objective.weights == (1, 0.3, 0.2)
    before = job.trainer.model.state()["early.w"].copy()
    job.trainer.fit(job.train, job.validation, global_batch_size=5, epochs=1)
    assert (job.trainer.model.state()["early.w"] != before).all()
    assert set(job.trainer.history[0]) == {"loss", "accuracy", "lr", "val_loss", "val_accuracy"}


def test_an_optimizer_of_ones_own_has_the_numbers_of_the_command_line_or_its_own(make):
    lion = make(optimizer="own.py:Lion", schedule="constant").trainer.optimizer
    assert (lion.lr_now, lion.weight_decay, lion.clip_norm, lion.beta) == (0.003, 1e-4, None, 0.9)
    numbers: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, "clip_norm": 2.0}
    numbers |= {"optimizer": "own.py:Lion", "schedule": "constant"}
    lion = make(optimizer_options={"beta": 0.8}, **numbers).trainer.optimizer
    assert (lion.lr_now, lion.weight_decay, lion.clip_norm, lion.beta) == (0.1, 0.0, 2.0, 0.8)


def test_a_schedule_of_ones_own_is_a_function_of_the_step_and_may_be_warmed_up(make):
    optimizer = make(schedule="own.py:halves").trainer.optimizer
    assert [optimizer.schedule(step) for step in range(3)] == [1, 0.5, 0.25]
    warm = make(schedule="own.py:halves", warmup_epochs=0.5).trainer.optimizer.schedule
    assert isinstance(warm, WarmUp)
    assert (warm.steps, warm(4)) == (2, 0.5**4)


def test_listed_layers_are_frozen(make):
    model = make(freeze="fc1, fc2.b").trainer.model
    assert {*model.frozen} == {"fc1.w", "fc1.b", "fc2.b"}


@pytest.mark.parametrize(
    ("given", "recompute"), [("3", 3), ("auto", ("auto",)), ("fc1, relu1", ("fc1", "relu1"))]
)
def test_what_is_recomputed_is_a_number_names_or_auto(given, recompute, make):
    limit = {"memory_limit": "1.5GiB"} if given == "auto" else {}
    model = make(recompute=given, **limit).trainer.model
    assert model.recompute == recompute
    assert model.memory_limit == (3 << 29 if limit else None)


def test_the_learning_rate_follows_the_global_batch_and_decay_is_the_rule_s_own(make):
    """5 instead of 64 samples."""
    for how, factor in (("none", 1), ("linear", 5 / 64), ("sqrt", (5 / 64) ** 0.5)):
        optimizer = make(lr=0.1, lr_scaling=how, schedule="constant").trainer.optimizer
        assert optimizer.lr_now == pytest.approx(0.1 * factor)
    for rule, decay in (("sgd", 1e-4), ("adamw", 0.01)):
        assert make(optimizer=rule).trainer.optimizer.weight_decay == decay


def test_parts_of_ones_own_train_together(make):
    job = make(optimizer="own.py:Lion", schedule="own.py:halves", loss="own.py:Focal")
    (logs,) = job.trainer.fit(job.train, job.validation, batch_size=5)
    assert logs["lr"] == 0.5**3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dataset": "own.py:poinds"}, "data set: unknown name in own.py 'poinds'; did you mean"),
        ({"dataset": "own.py:one_set"}, "data set own.py:one_set: expected a pair of data sets"),
        ({"dataset_options": {"sampels": 3}}, "unknown option of own.py:points 'sampels'; did you"),
        ({"dataset": "own.py:halves"}, "data set own.py:halves: missing a required argument: 'st"),
        ({"optimizer": "own.py:points"}, "--optimizer: own.py:points must have a parameter `lr`"),
        ({"optimizer": "own.py:NeedsARate"}, "--lr: own.py:NeedsARate has no default learning"),
        ({"optimizer": "own.py:Lion", "momentum": 0.5}, "--momentum: own.py:Lion has no parameter"),
        ({"schedule": "own.py:number"}, "schedule own.py:number: expected a function of the step"),
        ({"schedule": "own.py:halves", "lr": 1.0}, "--lr: own.py:halves sets the learning rate"),
        ({"schedule": "own.py:halves", "lr_scaling": "sqrt"}, "--lr-scaling: own.py:halves sets"),
        ({"loss": "own.py:Own"}, "loss own.py:Own: expected a Loss, or a class or function that"),
        ({"loss": "own.py:ready", "label_smoothing": 0.1}, "label_smoothing: own.py:ready has no"),
        ({"loss_options": {"class_weights": [1, 2]}}, "class_weights must be 3 numbers, one for"),
        ({"loss_options": {"label_smoothing": 0.1}}, "--loss: label_smoothing is not one of"),
        ({"metrics": "own.py:Focal"}, "metric own.py:Focal: expected a Metric, or a class or fun"),
        ({"metrics": "top5_accuracy"}, "at most the number of classes 3, got 5"),
        ({"memory_limit": "1GiB"}, "train: --memory-limit requires --recompute auto"),
        ({"recompute": "auto", "memory_limit": "2XB"}, "memory-limit: expected a number with"),
        ({"freeze": "*"}, "--freeze: * leaves no parameters to train; freeze fewer"),
        ({"model": "own.py:two_heads"}, "--loss auxiliary_weights must be 2 numbers"),
        (HEADS | {"auxiliary_weights": "0.3"}, "--loss auxiliary_weights must be 2 numbers"),
        (HEADS | {"auxiliary_weights": "0.3,x"}, "--loss auxiliary_weights must be num"),
        ({"auxiliary_weights": "0.3"}, "--loss auxiliary_weights: the model has one output"),
    ],
)
def test_what_does_not_suit_is_refused_in_a_sentence(options, sentence, make):
    with pytest.raises((TypeError, ValueError)) as error:
        make(**options)
    told = str(error.value)
    assert sentence in told
    assert not told.startswith("--")  # errors about options begin with "train: "
