"""Models and schemes that fail, for tests of what a run then says."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any

from pydtnn.comm.exchange import AllReduce, GradientExchange
from pydtnn.data import Batch, Loader
from pydtnn.kernels.reference.family import Array
from pydtnn.layers import Conv2d, Flatten, Layer, Linear, Residual, Sequential, StepContext
from pydtnn.optimizers import Optimizer

RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


Shape = tuple[int, ...]


class Bad(Layer):
    """Fails on rank 1 in the third step."""

    calls = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Array, context: StepContext) -> tuple[Array, Any]:
        self.calls += 1
        self.do("forward")
        return x, None

    def backward(self, dy: Array, saved: Any) -> Array:
        self.do("backward")
        return dy

    def do(self, where: str) -> None:
        if RANK == 1 and self.calls == 3:
            if self.what == where:
                raise KeyError("thing")
            if self.what == "exit":
                raise SystemExit(3)
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)


class Plain(GradientExchange):
    pass


class Scheme(AllReduce):
    steps = 0

    def update(self, optimizer: Optimizer) -> None:
        self.steps += 1
        if self.steps == 3 and self.comm.rank == 1:
            raise KeyError("thing")
        super().update(optimizer)


def bad(classes: int, input_shape: Shape, what: str) -> Sequential:
    if what == "loader":
        fail_in_the_loader()
    return Sequential(Flatten(), Linear(8), Bad(what), Linear(classes))


def limited(classes: int, input_shape: Shape, room: int = 0) -> Sequential:
    """A model after which files cannot become larger than so many bytes."""
    if room:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    return Sequential(Flatten(), Linear(64), Linear(classes))


def fail_in_the_loader() -> None:
    original = Loader._load

    def load(self: Loader, order: Array, epoch: int, step: int) -> Batch:
        if RANK == 1 and step == 3:
            raise KeyError("thing")
        return original(self, order, epoch, step)

    Loader._load = load


def groups(classes: int, input_shape: Shape) -> Any:
    return Sequential(Conv2d(8, 3, groups=3), Flatten(), Linear(classes))


def kernel(classes: int, input_shape: Shape) -> Any:
    return Sequential(Conv2d(8, 15, padding=1), Flatten(), Linear(classes))


def padding(classes: int, input_shape: Shape) -> Any:
    return Sequential(Conv2d(8, 3, padding=4), Flatten(), Linear(classes))


def shapes(classes: int, input_shape: Shape) -> Any:
    return Sequential(Residual(Conv2d(8, 3)), Flatten(), Linear(classes))


def narrow(classes: int, input_shape: Shape) -> Any:
    return Sequential(Flatten(), Linear(classes - 1))


def image(classes: int, input_shape: Shape) -> Any:
    return Conv2d(classes, 3)


def no_parameters(classes: int, input_shape: Shape) -> Any:
    return Flatten()


def nothing(classes: int, input_shape: Shape) -> Any:
    return None


def one_argument(classes: int) -> Any:
    return Linear(classes)


def fault(classes: int, input_shape: Shape) -> Any:
    return {}["thing"]


number = 3
