"""The losses and metrics of a trainer that were not chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer, create_backend
from pydtnn.comm import Communicator, Serial
from pydtnn.layers import (
    Block,
    Conv2d,
    Dropout,
    Embedding,
    Linear,
    Reshape,
    Residual,
    Sequential,
    Sigmoid,
)
from pydtnn.losses import CategoricalCrossEntropy, Loss
from pydtnn.metrics import AUC
from pydtnn.optimizers import SGD
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import AllReduce, GradientExchange, LocalSGD
from pydtnn.training.objective import Objective
from tests.each import each
from tests.small_training import checksums


class Own(Loss):
    def compute(self, backend: Any, y: Any, target: Any, scale: Any, out: Any) -> Any:
        out[...] = 0
        return 0.0


def names(loss: Any, outputs: int = 1) -> tuple[str, ...]:
    return Objective(create_backend("numpy"), [(3,)] * outputs, loss, None, None).names


@each(
    ("loss", "metrics"),
    [
        ("cross_entropy", ["accuracy"]),
        ("hinge", ["accuracy"]),
        ("bce", ["binary_accuracy"]),
        ("mse", ["regression_mae"]),
        ("mae", ["regression_mse"]),
        (Own(), []),
    ],
)
def test_metrics_follow_the_loss_of_each_output(loss, metrics):
    assert names(loss) == ("loss", *metrics)
    second = [f"output1.{name}" for name in ("loss", *metrics)]
    expected = ("loss", "output0.loss", "output0.accuracy", *second)
    assert names(["cross_entropy", loss], 2) == expected


RNG = np.random.default_rng(0)
X, IMAGES = RNG.normal(size=(12, 5)), RNG.normal(size=(12, 4, 4, 2))
LABELS = np.arange(12) % 3
MASKS = RNG.integers(0, 3, (12, 4, 4))
TOKENS = RNG.integers(0, 3, (12, 7)).astype("float32")
EMBEDDED = partial(Sequential, Embedding(3, 4), Linear(3))
DENSE, PIXELS = partial(Linear, 3), partial(Conv2d, 3, 1)


@each(
    ("x", "y", "net", "loss", "metrics"),
    [
        (X, RNG.normal(size=(12, 3)), DENSE, "mse", ["r2"]),
        (X, RNG.integers(0, 2, (12, 3)), DENSE, "bce", None),
        (X, RNG.random((12, 3)) < 0.5, DENSE, "bce", ["binary_accuracy", AUC(labels=3)]),
        (X, RNG.random(12) < 0.5, partial(Linear, 1), "bce", ["accuracy", "auc"]),
        (TOKENS, TOKENS.astype(int), EMBEDDED, "cross_entropy", ["perplexity", "f1"]),
        (IMAGES, MASKS, PIXELS, "cross_entropy", ["iou", "confusion_matrix", "micro_recall"]),
        (IMAGES, np.eye(3, dtype=int)[MASKS], PIXELS, "cross_entropy", None),
        (IMAGES, np.eye(3)[MASKS], PIXELS, "cross_entropy", ["accuracy", "perplexity"]),
        (IMAGES, MASKS == 2, partial(Conv2d, 1, 1), "bce", None),
    ],
)
def test_targets_of_each_kind_train(x, y, net, loss, metrics):
    data = ArrayDataset(x, y)
    trainer = Trainer(Model(Sequential(net()), data.input_shape), "sgd", loss=loss, metrics=metrics)
    trainer.fit(data, data, epochs=1, batch_size=5)
    assert all(np.isfinite(value) for value in trainer.history[-1].values())
    task = {"mse": "numbers", "bce": "labels", "cross_entropy": "classes"}[loss]
    assert trainer.model.inputs.tasks == (task,)


def test_integers_are_classes_for_a_loss_that_says_nothing():
    objective = Objective(create_backend("numpy"), [(4, 4, 3)], Own(), None, None)
    for target, task in ((MASKS, "classes"), (IMAGES, "")):
        assert objective.describe(ArrayDataset(IMAGES, target)).tasks == (task,)


@each(
    ("net", "unread"),
    [
        (lambda: Linear(3), True),
        (lambda: Sequential(Linear(3), Dropout(0.1)), False),
        (lambda: Sequential(Linear(3), Sigmoid()), False),  # backward reads the output
        (lambda: Sequential(Linear(3), Residual(Sequential(Linear(3), Reshape((3,))))), True),
        (lambda: Sequential(Linear(3), Reshape((3,))), False),
    ],
)
def test_a_gradient_overwrites_an_output_that_backward_does_not_read(net, unread):
    weights = []
    for apart in (False, True):
        model = Model(Sequential(Linear(4), net()), (5,), dtype="float64", seed=1)
        trainer = Trainer(model, SGD(0.5), metrics=["accuracy"], progress=False)
        assert trainer.objective.unread == (unread,)
        if apart:
            trainer.objective.unread = (False,)
        trainer.fit(ArrayDataset(X, LABELS), epochs=2, batch_size=5)
        weights.append([(name, a.tobytes()) for name, a in model.state().items()])
    assert weights[0] == weights[1]
    assert 0 < trainer.history[-1]["accuracy"] <= 1


class Twice(Block):
    """Its outputs: one that another layer reads, and one that is given twice."""

    def wire(self, graph: Any, x: Any) -> Any:
        a = graph.add(Linear(3, name="a"), x)
        c = graph.add(Linear(3, name="b"), a)
        return a, c, c


def test_outputs_that_are_read_elsewhere_are_not_overwritten():
    assert Model(Twice(), (5,)).unread_outputs == (False, False, False)
    assert not Own.overwrites
    assert not type("Changed", (CategoricalCrossEntropy,), {}).overwrites


def segment(
    comm: Communicator, *, scheme: Callable[..., GradientExchange] = AllReduce, **options: Any
) -> Trainer:
    """Train on masks, of which some samples have few labels and some none."""
    rng = np.random.default_rng(3)
    share = np.array([0.0, 0.1, 1.0, 0.9] * 3)[:, None, None]
    y = np.where(rng.random(MASKS.shape) < share, MASKS, 255)
    data = ArrayDataset(IMAGES, y, classes=3, ignore_index=255)
    model = Model(Sequential(Conv2d(3, 1, name="map")), data.input_shape, dtype="float64")
    loss = CategoricalCrossEntropy(ignore_index=255)
    trainer = Trainer(
        model, "sgd", loss=loss, metrics=["f1"], exchange=scheme(comm), progress=False, **options
    )
    trainer.fit(data, data, epochs=2, global_batch_size=5)
    return trainer


@pytest.mark.threads(1, 3)
@each("accumulation", [1, 2])
def test_the_mean_over_targets_that_are_not_ignored_is_that_of_the_whole_batch(comm, accumulation):
    trainer, one = segment(comm, accumulation=accumulation), segment(Serial())
    for name, value in one.model.state().items():
        # sums in another order
        np.testing.assert_allclose(trainer.model.state()[name], value, rtol=1e-11, atol=1e-14)
    assert trainer.losses == pytest.approx(one.losses, rel=1e-12)
    assert trainer.history == [pytest.approx(logs, rel=1e-12) for logs in one.history]
    exact = partial(AllReduce, sums=lambda comm: ExactSums(comm, shards=4))
    trainer, one = segment(comm, scheme=exact), segment(Serial(), scheme=exact)
    assert checksums(trainer.model.state()) == checksums(one.model.state())
    assert trainer.history == one.history
    alone = segment(comm, scheme=LocalSGD)  # each rank by itself, reported over all
    assert alone.losses[0] == pytest.approx(one.losses[0], rel=1e-12)  # before any update
    assert np.isfinite(alone.losses).all()


def test_a_step_with_ignored_targets_is_the_formula_of_pytorch():
    """``sum over labels of -log p / number of labels``, and its gradient."""
    data = ArrayDataset(IMAGES[:4], np.where(MASKS[:4] == 1, 255, MASKS[:4]), ignore_index=255)
    model = Model(Sequential(Conv2d(3, 1, name="map")), data.input_shape, dtype="float64")
    w = model.state()["map.w"].reshape(3, 2).copy()
    x, y = IMAGES[:4][data.y < 255], data.y[data.y < 255]
    scores = x @ w.T
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    gradient = (p - np.eye(3)[y]).T @ x / len(y)
    trainer = Trainer(model, SGD(1.0), loss=CategoricalCrossEntropy(ignore_index=255))
    trainer.fit(data, epochs=1, batch_size=4)
    assert trainer.losses == [pytest.approx(loss, rel=1e-12)]
    np.testing.assert_allclose(model.state()["map.w"].reshape(3, 2), w - gradient, rtol=1e-10)


def mean_loss(model: Model, name: str, labels: np.ndarray) -> float:
    """The loss of a linear layer over the labels from 0, by its formula."""
    kept = labels >= 0
    scores = X[kept] @ model.state()[f"{name}.w"].T
    own = scores[np.arange(kept.sum()), labels[kept]]
    return float((np.log(np.exp(scores).sum(axis=1)) - own).mean())


class Both(Block):
    """Two linear layers beside each other."""

    def wire(self, graph: Any, x: Any) -> Any:
        return graph.add(Linear(3, name="a"), x), graph.add(Linear(3, name="b"), x)


def test_each_output_divides_by_its_own_targets_and_auxiliary_ones_are_not_evaluated():
    first, second = np.where(np.arange(12) < 9, -1, LABELS), LABELS[::-1].copy()
    ignoring = CategoricalCrossEntropy(ignore_index=-1)
    for y, options in (
        ((first, second), {"loss": [ignoring, "cross_entropy"], "loss_weights": [0.5, 2.0]}),
        (first, {"loss": ignoring, "auxiliary_weights": [0.3]}),
    ):
        model = Model(Both(), (5,), dtype="float64")
        data = ArrayDataset(X, y, classes=3 if y is first else (3, 3), ignore_index=-1)
        (logs,) = Trainer(model, SGD(0.0), **options).fit(data, data, epochs=1, batch_size=5)
        a, b = mean_loss(model, "a", first), mean_loss(model, "b", first if y is first else second)
        if y is first:
            assert logs["loss"] == pytest.approx(a + 0.3 * b, rel=1e-12)
            assert logs["val_loss"] == pytest.approx(a, rel=1e-12)
        else:
            assert logs["output0.loss"] == pytest.approx(a, rel=1e-12)
            assert logs["val_loss"] == pytest.approx(0.5 * a + 2 * b, rel=1e-12)


def test_no_target_at_all_has_the_loss_0_and_no_gradient():
    data = ArrayDataset(X, np.full(12, -1), classes=3, ignore_index=-1)
    model = Model(Sequential(Linear(3, name="a")), (5,), dtype="float64")
    before = model.state()["a.w"].copy()
    trainer = Trainer(model, "sgd", loss=CategoricalCrossEntropy(ignore_index=-1))
    trainer.fit(data, data, epochs=1, batch_size=4)
    assert trainer.losses == [0, 0, 0]
    np.testing.assert_array_equal(model.state()["a.w"], before)


@pytest.mark.threads(1, 3)
def test_counts_of_several_ranks_are_those_of_the_whole_data(comm):
    metrics = ["f1", "per_label_recall", "confusion_matrix", "iou"]
    model = Model(Sequential(Linear(3)), (5,), dtype="float64")
    trainer = Trainer(model, "sgd", metrics=metrics, exchange=AllReduce(comm), progress=False)
    data = ArrayDataset(X, LABELS)
    logs = trainer.evaluate(data, batch_size=2)
    predicted = model.predict(X).argmax(axis=1)
    matrix = np.zeros((3, 3), int)
    np.add.at(matrix, (LABELS, predicted), 1)
    np.testing.assert_array_equal(logs["confusion_matrix"], matrix)
    right = np.diag(matrix)
    f1 = 2 * right / (matrix.sum(axis=0) + matrix.sum(axis=1))
    assert logs["f1"] == pytest.approx(f1.mean(), rel=1e-12)
    np.testing.assert_allclose(logs["per_label_recall"], right / matrix.sum(axis=1), rtol=1e-12)
    trainer.fit(data, data, epochs=1, global_batch_size=5)
    assert {"f1", "val_iou"} <= set(trainer.history[-1])
    assert not any("matrix" in name or "per_label" in name for name in trainer.history[-1])


def test_a_metric_that_does_not_fit_says_that_others_can_be_chosen():
    data = ArrayDataset(X, RNG.normal(size=(12, 3)))
    trainer = Trainer(Model(DENSE(), (5,)), "sgd", loss="mse", metrics=["accuracy"])
    with pytest.raises(ValueError, match=r"or choose other metrics than accuracy \(metrics=\["):
        trainer.fit(data, epochs=1, batch_size=5)
