"""Models and schemes that fail, for tests of what a run then says."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np

from pydtnn.data import Batch, Loader
from pydtnn.kernels.reference.family import Array
from pydtnn.layers import Conv2d, Flatten, Layer, Linear, Residual, Sequential, StepContext
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import AllReduce

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


class Failing(AllReduce):
    """Fails on rank 1 in the third step, where the other ranks wait for it."""

    steps = 0

    def update(self, optimizer: Optimizer) -> None:
        self.steps += 1
        super().update(optimizer)

    @property
    def is_time(self) -> bool:
        return self.comm.rank == 1 and self.steps == 2


class FailsInUpdate(Failing):
    def update(self, optimizer: Optimizer) -> None:
        if self.is_time:
            raise KeyError("thing")
        super().update(optimizer)


class FailsInACollective(Failing):
    def update(self, optimizer: Optimizer) -> None:
        gradients = self.buckets[0].grads
        self.comm.allreduce(gradients[::2] if self.is_time else gradients.copy())
        super().update(optimizer)


class FailsToReceive(Failing):
    """Gets a message that is longer than its array."""

    def update(self, optimizer: Optimizer) -> None:
        after, before = (self.comm.rank + 1) % self.comm.size, (self.comm.rank - 1) % self.comm.size
        request = self.comm.irecv(np.empty(100 - self.is_time), before)
        self.comm.send(np.empty(100), after)
        request.wait()
        super().update(optimizer)


class FailsInAThread(Failing):
    def update(self, optimizer: Optimizer) -> None:
        if self.is_time:
            helper = threading.Thread(target=self.exchange)
            helper.start()
            self.comm.recv(np.empty(1), 1)  # what the helper was to send
        super().update(optimizer)

    def exchange(self) -> None:
        raise KeyError("thing")


def bad(classes: int, input_shape: Shape, what: str) -> Sequential:
    if what == "loader":
        fail_in_the_loader()
    return Sequential(Flatten(), Linear(8), Bad(what), Linear(classes))


def fail_in_the_loader() -> None:
    original = Loader._load

    def load(self: Loader, order: Array, epoch: int, step: int) -> Batch:
        if RANK == 1 and step == 3:
            raise KeyError("thing")
        return original(self, order, epoch, step)

    Loader._load = load


def groups(classes: int, input_shape: Shape) -> Any:
    return Sequential(Conv2d(8, 3, groups=3), Flatten(), Linear(classes))


def shapes(classes: int, input_shape: Shape) -> Any:
    return Sequential(Residual(Conv2d(8, 3)), Flatten(), Linear(classes))


def narrow(classes: int, input_shape: Shape) -> Any:
    return Sequential(Flatten(), Linear(classes - 1))


def fault(classes: int, input_shape: Shape) -> Any:
    return {}["thing"]


number = 3
