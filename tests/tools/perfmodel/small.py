"""A small network for tests of predictions."""

from __future__ import annotations

from typing import Any

from pydtnn.layers import BatchNorm, Conv2d, Flatten, Linear, Net, ReLU, Sequential
from pydtnn.training.workload import Workload

SHAPE = (8, 8, 4)


def small_net(classes: int, input_shape: tuple[int, ...]) -> Net:
    return Sequential(
        Conv2d(8, 3, name="conv1"), BatchNorm(), ReLU(),
        Conv2d(8, 3, name="conv2"), ReLU(), Flatten(), Linear(classes, name="head"),
    )  # fmt: skip


def small_work(batch: int = 8, **options: Any) -> Workload:
    return Workload(small_net, SHAPE, classes=4, batch=batch, **options)
