"""Small networks and trainings that are the same on every backend, and what must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pydtnn.comm import Serial
from pydtnn.data import ArrayDataset
from pydtnn.kernels import Backend
from pydtnn.layers import (
    AvgPool2d,
    BatchNorm,
    ClassToken,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    GroupNorm,
    Linear,
    MaxPool2d,
    MultiHeadAttention,
    PositionalEmbedding,
    ReLU,
    Reshape,
    Residual,
    Sequential,
)
from pydtnn.layers.blocks import Net
from pydtnn.model import Model
from pydtnn.optimizers import SGD, Optimizer
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.trainer import Trainer

SHAPE, CLASSES, SAMPLES, BATCH = (7, 7, 2), 3, 20, 8


def convolutional() -> Sequential:
    return Sequential(Conv2d(4, 3), BatchNorm(), ReLU(), Flatten(), Linear(CLASSES))


def residual() -> Sequential:
    """Two blocks, with a shorter way that is convolved, too, and an uneven padding."""
    body = [Conv2d(4, 3, padding=1, bias=False), BatchNorm(), ReLU()]
    more = [Conv2d(4, 3, padding=1, bias=False), BatchNorm()]
    wider = [Conv2d(6, 3, stride=2, padding=1, bias=False), BatchNorm(), ReLU()]
    shorter = Sequential(Conv2d(6, 1, stride=2, bias=False), BatchNorm())
    return Sequential(
        Conv2d(4, 3, padding=((0, 1), (1, 0)), bias=False),
        BatchNorm(),
        ReLU(),
        Residual(Sequential(*body, *more)),
        ReLU(),
        Residual(Sequential(*wider, Conv2d(6, 3, padding=1, bias=False), BatchNorm()), shorter),
        ReLU(),
        GlobalAvgPool2d(),
        Linear(CLASSES),
    )


def pooled() -> Sequential:
    return Sequential(
        Conv2d(4, 3, padding=1),
        ReLU(),
        MaxPool2d(3, stride=2, padding=1),
        Conv2d(4, 3, padding=1, groups=2),
        ReLU(),
        AvgPool2d(2),
        Dropout(0.3),
        Flatten(),
        Linear(CLASSES),
    )


def group_normed() -> Sequential:
    return Sequential(Conv2d(4, 3), GroupNorm(2), ReLU(), GlobalAvgPool2d(), Linear(CLASSES))


def attentive() -> Sequential:
    return Sequential(
        Conv2d(4, 3, stride=2),
        Reshape((-1, 4)),
        ClassToken(),
        PositionalEmbedding(),
        Residual(MultiHeadAttention(2, causal=True)),
        Flatten(),
        Linear(CLASSES),
    )


NETWORKS: dict[str, Callable[[], Net]] = {
    function.__name__: function
    for function in (convolutional, residual, pooled, group_normed, attentive)
}


def data(seed: int = 0, samples: int = SAMPLES) -> ArrayDataset:
    rng = np.random.default_rng(seed)
    return ArrayDataset(rng.normal(size=(samples, *SHAPE)), rng.integers(0, CLASSES, samples))


def trainer(
    backend: Backend | str,
    network: Callable[[], Net] = convolutional,
    optimizer: Optimizer | None = None,
    *,
    dtype: str = "float64",
    fuse: bool = True,
    **options: Any,
) -> Trainer:
    model = Model(network(), SHAPE, backend=backend, dtype=dtype, fuse=fuse)
    exchange = AllReduce(Serial())
    rule = optimizer or SGD(0.05, momentum=0.9, weight_decay=1e-3)
    return Trainer(model, rule, exchange=exchange, **options)


def results(trainer: Trainer, epochs: int = 4, samples: int = SAMPLES) -> dict[str, np.ndarray]:
    """Train; return the history and all that was learnt, by name."""
    train = data(samples=samples)
    history = trainer.fit(train, data(1, 9), epochs=epochs, global_batch_size=BATCH, seed=3)
    state = {name: np.array(value) for name, value in trainer.model.state().items()}
    return history_of(history) | state


def history_of(history: list[dict[str, float]]) -> dict[str, np.ndarray]:
    return {
        f"epoch {i} {k}": np.array(v) for i, logs in enumerate(history) for k, v in logs.items()
    }


def assert_agree(
    value: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-10
) -> None:
    """In norm; numbers of the history relative to themselves."""
    assert value.keys() == expected.keys()
    for name, exact in expected.items():
        error, size = (float(np.linalg.norm(array)) for array in (value[name] - exact, exact))
        assert error <= tolerance * max(size, 1e-3), f"{name}: {error} in norm"
