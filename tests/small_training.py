"""A training run of a fraction of a second that has everything a run can have."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.callbacks import Callback, Checkpointer, EarlyStopping
from pydtnn.comm import Communicator, Serial
from pydtnn.data.augment import HorizontalFlip
from pydtnn.layers import BatchNorm, Conv2d, Dropout, Flatten, Linear, ReLU, Sequential
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.schedules import Cosine
from pydtnn.training.checkpoint import save_checkpoint
from pydtnn.utils import clock
from pydtnn.utils.clock import Clock
from pydtnn.utils.errors import AgreedError

STEPS = 4
"""Steps per epoch; the last batch is smaller."""

Result = tuple[dict[str, np.ndarray], list[dict[str, float]]]
"""Weights and history of a run."""


def small_model(*, filters: int = 4, seed: int = 0, dtype: str = "float64") -> Model:
    net = Sequential(
        Conv2d(filters, 3), BatchNorm(), ReLU(), Dropout(0.2), Flatten(), Linear(3, name="head")
    )
    return Model(net, (5, 5, 2), backend="numpy", dtype=dtype, seed=seed)


def small_data() -> tuple[ArrayDataset, ArrayDataset]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(45, 5, 5, 2)), rng.integers(0, 3, 45)
    return ArrayDataset(x[:29], y[:29]), ArrayDataset(x[29:], y[29:])


def small_trainer(
    comm: Communicator | None = None,
    *callbacks: Callback,
    model: Model | None = None,
    optimizer: Optimizer | None = None,
    exchange: GradientExchange | None = None,
) -> Trainer:
    return Trainer(
        model or small_model(),
        optimizer or SGD(Cosine(0.1, 16), momentum=0.9, weight_decay=1e-3),
        exchange=exchange or AllReduce(comm or Serial()),
        callbacks=callbacks,
        progress=False,
    )


def small_fit(trainer: Trainer, epochs: int = 2) -> list[dict[str, float]]:
    train, validation = small_data()
    return trainer.fit(
        train, validation, epochs=epochs, global_batch_size=8, augment=[HorizontalFlip()], seed=3
    )


def trained(directory: Path, comm: Communicator | None = None, epochs: int = 2) -> Trainer:
    """A trainer that has left a checkpoint of each epoch: checkpoint-00000004, -00000008, ..."""
    trainer = small_trainer(comm, EarlyStopping(), Checkpointer(directory))
    small_fit(trainer, epochs)
    return trainer


def fingerprint(trainer: Trainer) -> list[Any]:
    """Everything that must be equal after two runs that are to be equal, to the last bit."""
    return [
        checksums(trainer.model.state()),
        checksums(trainer.optimizer.state()),
        trainer.history,
        [callback.state() for callback in trainer.callbacks if callback.state()],
    ]


def checksums(state: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(np.asarray(v).tobytes()).hexdigest() for name, v in state.items()}


def assert_same_training(result: Result, expected: Result) -> None:
    """Assert that weights and history are equal up to rounding in float64.

    Sums over ranks have another order than sums over samples; batch norm divides by deviations
    near 1.
    """
    for name, value in expected[0].items():
        np.testing.assert_allclose(result[0][name], value, rtol=1e-12, atol=1e-12, err_msg=name)
    for ours, other in zip(result[1], expected[1], strict=True):
        assert ours == pytest.approx(other, rel=1e-12, abs=1e-12)


class Recorder(Callback):
    """Calls a function at the end of every step and epoch."""

    def __init__(self, on_step: Any = None, on_epoch: Any = None) -> None:
        self.on_step, self.on_epoch = on_step, on_epoch

    def on_step_end(self, trainer: Trainer) -> None:
        if self.on_step:
            self.on_step(trainer)

    def on_epoch_end(self, trainer: Trainer) -> None:
        if self.on_epoch:
            self.on_epoch(trainer)


class Ticks(Clock):
    """A clock that only `spend` moves, so that times do not depend on the machine."""

    seconds = 0.0

    def now_ns(self) -> int:
        return round(self.seconds * 1e9)


def spend(seconds: float) -> None:
    """Let time pass on the clock of the calling thread, in ``clock.used(Ticks())``."""
    clock.current().seconds += seconds  # type: ignore[attr-defined]


class Interrupted(AgreedError):
    """Stands for whatever ends a run, on all ranks."""


class Interrupt(Callback):
    """Ends a run after so many steps; where it has a folder, it saves a checkpoint before."""

    def __init__(self, at: int, directory: Path | None = None) -> None:
        self.at, self.directory = at, directory

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.optimizer.iterations == self.at:
            if self.directory is not None:
                save_checkpoint(self.directory, trainer)
            raise Interrupted("enough")


def follow(callback: Callback, values: Sequence[float], name: str = "val_loss") -> list[bool]:
    """Show a callback one value per epoch; return after which of them training was to stop."""
    trainer = small_trainer(None, callback)
    callback.on_fit_start(trainer, len(values), STEPS)
    stops = []
    for value in values:
        trainer.logs = {name: value}
        trainer.epoch += 1
        callback.on_epoch_end(trainer)
        stops.append(trainer.stop)
    return stops
