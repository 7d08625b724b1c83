"""Parts of a training that are used again in another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from pydtnn import Model, Trainer
from pydtnn.callbacks import (
    EMA,
    BestWeights,
    Callback,
    EarlyStopping,
    ReduceOnPlateau,
    StopAtMetric,
)
from pydtnn.data import ArrayDataset
from pydtnn.data.augment import HorizontalFlip, RandAugment, RandomCrop
from pydtnn.data.mixing import CutMix, Mixup
from pydtnn.layers import Flatten, Linear, Sequential
from pydtnn.losses import CategoricalCrossEntropy
from pydtnn.metrics import Accuracy
from pydtnn.optimizers import OPTIMIZERS, SGD, AdamW, get_optimizer
from pydtnn.parallel.compression import COMPRESSORS, create_sums
from pydtnn.parallel.schemes import SCHEMES, AllReduce, OneBitAdam
from pydtnn.schedules import OneCycle
from tests.each import each
from tests.small_training import checksums, small_fit, small_model, small_trainer


def check_beginning(make: Callable[[], Any], fit: Callable[[Any, int], Trainer]) -> None:
    """Check that a part that a training has used makes no difference to the next one."""
    found, used = [], make()
    for part, seed in ((used, 0), (used, 1), (make(), 1)):
        trainer = fit(part, seed)
        states = checksums(trainer.model.state()), checksums(trainer.optimizer.state())
        found.append((trainer.history, *states))
        trainer.optimizer.lr_factor = 0.5  # as `ReduceOnPlateau`
    assert found[1] == found[2]


def fitted(*callbacks: Callback, seed: int, epochs: int = 3, **options: Any) -> Trainer:
    trainer = small_trainer(None, *callbacks, model=small_model(seed=seed), **options)
    small_fit(trainer, epochs)
    return trainer


@each("name", OPTIMIZERS)
def test_an_optimizer_begins_anew_in_a_second_training(name):
    check_beginning(
        lambda: get_optimizer(name, lr=OneCycle(0.01, 12), clip_norm=1.0),
        lambda optimizer, seed: fitted(seed=seed, epochs=1, optimizer=optimizer),
    )


@pytest.mark.few(2)
@pytest.mark.threads(2)
@pytest.mark.parametrize("name", [*SCHEMES, *COMPRESSORS])
def test_a_scheme_begins_anew_in_a_second_training(comm, name):
    def fit(exchange: Any, seed: int) -> Trainer:
        optimizer = AdamW() if isinstance(exchange, OneBitAdam) else SGD(0.1, momentum=0.9)
        return fitted(seed=seed, optimizer=optimizer, exchange=exchange)

    scheme = SCHEMES.get(name) or (lambda comm: AllReduce(comm, sums=create_sums(name)))
    check_beginning(lambda: scheme(comm), fit)


def test_loss_metrics_samplers_and_augmentations_have_no_state():
    rng = np.random.default_rng(0)
    data = ArrayDataset(rng.integers(0, 255, (40, 8, 8, 3), np.uint8), np.arange(40) % 4 // 3)

    def make() -> tuple[Any, ...]:
        loss = CategoricalCrossEntropy(class_weights=[1.0, 3.0], label_smoothing=0.1)
        augment = [RandomCrop(1), HorizontalFlip(), RandAugment()]
        drawn = data.subset([0, 0, *range(len(data))])
        return loss, [Accuracy()], augment, [Mixup(0.2), CutMix(0.5)], drawn

    def fit(parts: tuple[Any, ...], seed: int) -> Trainer:
        loss, metrics, augment, mix, drawn = parts
        model = Model(Sequential(Flatten(), Linear(2)), (8, 8, 3), backend="numpy", seed=seed)
        trainer = Trainer(model, SGD(0.1), loss=loss, metrics=metrics, progress=False)
        trainer.fit(drawn, data, epochs=2, batch_size=8, augment=augment, mix=mix)
        return trainer

    check_beginning(make, fit)


@each(
    "make",
    [
        lambda path: EarlyStopping("loss", 1, min_delta=9, restore_best=True),
        lambda path: ReduceOnPlateau("loss", patience=0, min_delta=9, cooldown=1),
        lambda path: StopAtMetric("loss", 1.05),
        lambda path: BestWeights(path / "best.safetensors", "loss", restore_best=True),
        lambda path: EMA(0.9),
    ],
)
def test_a_callback_begins_anew_in_a_second_training(make, tmp_path):
    check_beginning(lambda: make(tmp_path), lambda own, seed: fitted(own, seed=seed))


def test_a_callback_continues_with_the_state_of_its_trainer():
    plateau = ReduceOnPlateau("loss", patience=1, min_delta=9)
    first, second = (small_trainer(None, plateau) for _ in range(2))
    for epochs in (2, 3):  # alternately: the third epoch of each is the second without a gain
        small_fit(first, epochs)
        small_fit(second, epochs)
    assert [trainer.optimizer.lr_factor for trainer in (first, second)] == [0.1, 0.1]


def test_a_state_that_exists_only_in_training_is_refused_in_another_one():
    class Counter(Callback):
        def on_fit_start(self, trainer: Any, epochs: int, steps: int) -> None:
            self.seen = np.zeros(1)

        def state(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load(self, state: Mapping[str, Any]) -> None:
            self.seen = state["seen"]

    counter = Counter()
    small_fit(small_trainer(None, counter), 1)
    trainer = small_trainer(None, counter)
    with pytest.raises(ValueError, match="^Counter: expected a new object, got that of another"):
        small_fit(trainer, 1)
    assert trainer.optimizer.iterations == 0
