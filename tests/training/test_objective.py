"""The losses and metrics of a trainer that were not chosen."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn.data import ArrayDataset
from pydtnn.kernels import create_backend
from pydtnn.layers import Conv2d, Linear, Sequential
from pydtnn.losses import CategoricalCrossEntropy, Loss
from pydtnn.metrics import AUC
from pydtnn.model import Model
from pydtnn.training.objective import Objective
from pydtnn.training.trainer import Trainer


class Own(Loss):
    def compute(self, backend: Any, y: Any, target: Any, scale: Any, out: Any) -> Any:
        out[...] = 0
        return 0.0


def names(loss: Any, outputs: int = 1) -> tuple[str, ...]:
    return Objective(create_backend("numpy"), outputs, loss, None, None).names


@pytest.mark.parametrize(
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
def test_metrics_follow_the_loss(loss: Any, metrics: list[str]) -> None:
    assert names(loss) == ("loss", *metrics)


def test_each_output_has_the_metrics_of_its_loss() -> None:
    expected = ("output0.loss", "output0.accuracy", "output1.loss", "output1.regression_mae")
    assert names(["cross_entropy", "mse"], 2) == ("loss", *expected)


RNG = np.random.default_rng(0)
X, IMAGES = RNG.normal(size=(12, 5)), RNG.normal(size=(12, 4, 4, 2))
MASKS = RNG.integers(0, 3, (12, 4, 4))
DENSE, PIXELS, ONE = partial(Linear, 3), partial(Conv2d, 3, 1), partial(Linear, 1)


@pytest.mark.parametrize(
    ("x", "y", "net", "loss", "metrics"),
    [
        (X, RNG.normal(size=(12, 3)), DENSE, "mse", None),
        (X, RNG.integers(0, 2, (12, 3)), DENSE, "bce", None),
        (X, RNG.random((12, 3)) < 0.5, DENSE, "bce", ["binary_accuracy", AUC(labels=3)]),
        (X, RNG.random(12) < 0.5, ONE, "bce", ["accuracy", "auc"]),
        (IMAGES, MASKS, PIXELS, "cross_entropy", None),
        (IMAGES, np.eye(3, dtype=int)[MASKS], PIXELS, "cross_entropy", None),
        (IMAGES, np.eye(3)[MASKS], PIXELS, "cross_entropy", ["accuracy", "perplexity"]),
        (IMAGES, MASKS == 2, partial(Conv2d, 1, 1), "bce", None),
    ],
)
def test_targets_of_each_kind_train(x: Any, y: Any, net: Any, loss: str, metrics: Any) -> None:
    data = ArrayDataset(x, y)
    trainer = Trainer(Model(Sequential(net()), data.input_shape), "sgd", loss=loss, metrics=metrics)
    trainer.fit(data, data, epochs=1, batch_size=5)
    assert all(np.isfinite(value) for value in trainer.history[-1].values())


def test_labels_that_are_ignored_are_ignored_by_metrics_and_do_not_change_training() -> None:
    """Pixels with label 255 may have any score: weights are those without them."""
    kept = RNG.random(MASKS.shape) < 0.7
    results = []
    for scale in (1.0, 100.0):
        x = np.where(kept[..., None], IMAGES, scale * IMAGES)
        data = ArrayDataset(x, np.where(kept, MASKS, 255), ignore_index=255)
        model = Model(Sequential(Conv2d(3, 1)), data.input_shape, dtype="float64")
        loss = CategoricalCrossEntropy(ignore_index=255)
        trainer = Trainer(model, "sgd", loss=loss, metrics=["accuracy", "top2_accuracy"])
        trainer.fit(data, data, epochs=2, batch_size=5)
        results.append((trainer.history, {k: v.copy() for k, v in model.state().items()}))
    (first, weights), (second, others) = results
    assert first[-1] == pytest.approx(second[-1], rel=1e-12)
    for name, value in weights.items():
        np.testing.assert_allclose(value, others[name], rtol=1e-12)


def test_a_metric_that_does_not_fit_says_that_others_can_be_chosen() -> None:
    data = ArrayDataset(X, RNG.normal(size=(12, 3)))
    trainer = Trainer(Model(DENSE(), (5,)), "sgd", loss="mse", metrics=["accuracy"])
    with pytest.raises(ValueError, match=r"or choose other metrics than accuracy \(metrics=\["):
        trainer.fit(data, epochs=1, batch_size=5)
