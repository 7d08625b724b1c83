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
from pydtnn.losses import MeanSquaredError
from tests.each import each
from tests.simulated import simulated_backend, why_not
from tests.simulated.small import CLASSES, SHAPE, assert_agree, convolutional, trainer

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

SAMPLES, BATCH = 20, 8  # a last batch of 4


@dataclass(frozen=True)
class Brighter(Augmentation):
    """One that no kernel knows."""

    def __call__(self, x: Any, words: Any, fill: Any) -> Any:
        return x // 2 + 100


AUGMENT = (RandomCrop(2), HorizontalFlip(), Cutout(3))


def images() -> ArrayDataset:
    rng = np.random.default_rng(4)
    x = rng.integers(0, 256, (SAMPLES, *SHAPE)).astype(np.uint8)
    return ArrayDataset(x, rng.integers(0, CLASSES, SAMPLES))


def rows() -> ArrayDataset:
    return ArrayDataset(images().x.astype(np.float32) / 255, images().y)


def targets() -> ArrayDataset:
    rng = np.random.default_rng(5)
    return ArrayDataset(images().x, rng.normal(size=(SAMPLES, CLASSES)))


@each(
    ("data", "augment", "options", "graph"),
    [
        (images, (), {}, True),
        (images, AUGMENT, {}, True),
        (images, AUGMENT, {}, False),
        (images, (HorizontalFlip(), Brighter()), {}, True),
        (rows, AUGMENT, {}, True),
        (targets, AUGMENT, {"loss": MeanSquaredError(), "metrics": ()}, True),
    ],
)
def test_input_is_that_of_the_reference(
    data: Any, augment: Any, options: dict[str, Any], graph: bool
) -> None:
    def train(backend: Any) -> dict[str, np.ndarray]:
        made = trainer(backend, convolutional, graph=graph, **options)
        history = made.fit(
            data(),
            data(),
            epochs=3,
            global_batch_size=BATCH,
            augment=augment,
            targets="unchanged",  # rows of numbers depend on no position
            seed=2,
        )
        assert ("one CUDA graph" in made.steps.graph) == (graph and backend != "numpy")
        found = {name: np.array(value) for name, value in made.model.state().items()}
        for i, logs in enumerate(history):
            found |= {f"epoch {i} {name}": np.array(value) for name, value in logs.items()}
        return found

    assert_agree(train(simulated_backend(seed=1)), train("numpy"))


@each("options", [{}, {"loss": "mse"}])
def test_mixed_samples_are_those_of_the_reference(options: dict[str, Any]) -> None:
    """They come from the host, with probabilities as targets of the captured loss."""

    def train(backend: Any) -> dict[str, np.ndarray]:
        made = trainer(backend, convolutional, metrics=["accuracy", "categorical_mae"], **options)
        mix = [Mixup(0.3), CutMix()]
        made.fit(images(), epochs=3, global_batch_size=BATCH, augment=AUGMENT, mix=mix, seed=2)
        assert ("one CUDA graph" in made.steps.graph) == (backend != "numpy")
        logs = {name: np.array(value) for name, value in made.history[-1].items()}
        return logs | {name: np.array(value) for name, value in made.model.state().items()}

    assert_agree(train(simulated_backend(seed=1)), train("numpy"))
