"""Images on their way into a training on the simulated device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pydtnn.data import (
    ArrayDataset,
    Augmentation,
    CutMix,
    Cutout,
    HorizontalFlip,
    Mixup,
    RandomCrop,
)
from tests.each import each
from tests.simulated import simulated_backend, why_not
from tests.simulated.small import CLASSES, SHAPE, assert_agree, convolutional, history_of, trainer

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

SAMPLES, BATCH = 20, 8  # a last batch of 4


@dataclass(frozen=True)
class Brighter(Augmentation):
    """One that no kernel knows."""

    def __call__(self, x: Any, words: Any, fill: Any) -> Any:
        return x // 2 + 100


AUGMENT = {"augment": (RandomCrop(2), HorizontalFlip(), Cutout(3))}
OWN = {"augment": (HorizontalFlip(), Brighter())}
MIXED = AUGMENT | {"mix": [Mixup(0.3), CutMix()]}
"""Whose probabilities are targets of the captured loss."""

METRICS = ["accuracy", "regression_mae"]


@each(
    ("kind", "fitting", "options"),
    [
        ("classes", {}, {}),
        ("classes", AUGMENT, {"graph": False}),
        ("classes", OWN, {}),
        ("rows", AUGMENT, {}),
        ("targets", AUGMENT, {"loss": "mse", "metrics": ()}),
        ("classes", MIXED, {"metrics": METRICS}),
        ("classes", MIXED, {"metrics": METRICS, "loss": "mse"}),
    ],
)
def test_input_is_that_of_the_reference(kind, fitting, options):
    rng = np.random.default_rng(4)
    x = rng.integers(0, 256, (SAMPLES, *SHAPE)).astype(np.uint8)
    y = rng.integers(0, CLASSES, SAMPLES)
    if kind == "targets":
        y = rng.normal(size=(SAMPLES, CLASSES))
    data = ArrayDataset(x.astype(np.float32) / 255 if kind == "rows" else x, y)
    if "mix" not in fitting:  # rows of numbers depend on no position
        fitting = {**fitting, "targets": "unchanged"}

    def train(backend: Any) -> dict[str, np.ndarray]:
        made = trainer(backend, convolutional, **options)
        held_out = None if "mix" in fitting else data
        history = made.fit(data, held_out, epochs=3, global_batch_size=BATCH, seed=2, **fitting)
        captured = backend != "numpy" and "graph" not in options
        assert ("one CUDA graph" in made.steps.graph) == captured
        return history_of(history) | made.model.state()

    assert_agree(train(simulated_backend(seed=1)), train("numpy"))
