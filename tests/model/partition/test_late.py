"""Other layers run while the messages of an exchange travel."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest

from pydtnn import Mesh, Model
from pydtnn.comm import Communicator, run_threads
from pydtnn.kernels import create_backend
from pydtnn.layers import Identity, Sequential, StepContext
from pydtnn.model.passes import LatePasses
from pydtnn.models import create_net
from pydtnn.utils.observer import Kind, Observer

EXCHANGE, BESIDE = "stage2.0.conv2/partial-channels", "stage2.0.shortcut.conv"


class Order(Observer):
    """Keeps the activities in the order in which they begin."""

    def __init__(self) -> None:
        self.begun: list[tuple[Kind, str]] = []

    def begin(self, kind: Kind, name: str, *, nbytes: int = 0, bucket: int = -1) -> None:
        self.begun.append((kind, name))


def activities(comm: Communicator) -> list[tuple[Kind, str]]:
    with Mesh(comm, model=2) as mesh:
        shape = (16, 16, 3)
        backend = create_backend("cpu", threads=1)
        plan = {"*": {"alternate": "model"}}
        model = Model(
            create_net("resnet20", 10, shape), shape, backend=backend, mesh=mesh, plan=plan
        )
        model.observer = order = Order()
        x = np.ones((2, *shape), model.dtype)
        y, saved = model.forward(x, StepContext(training=True))
        model.backward(np.ones_like(y), saved)
        return order.begun


def test_the_convolution_of_a_shortcut_runs_while_the_main_branch_is_exchanged() -> None:
    for begun in run_threads(2, activities):
        names = [name for kind, name in begun if kind is Kind.FORWARD]
        start, end = [i for i, name in enumerate(names) if name == EXCHANGE]
        assert BESIDE in names[start + 1 : end]


def test_an_exchange_ends_before_a_layer_reads_its_result() -> None:
    for begun in run_threads(2, activities):
        for kind, reader in ((Kind.FORWARD, "stage2.0.bn2"), (Kind.BACKWARD, "stage2.0.conv2")):
            names = [name for own, name in begun if own is kind]
            last = max(i for i, name in enumerate(names) if name == EXCHANGE)
            assert last < names.index(reader)


def test_a_pass_is_finished_once_for_a_layer_that_reads_its_result_twice() -> None:
    *_, source, reader = Model(Sequential(Identity(), Identity()), (3,)).graph.nodes
    reader.inputs = (source, source)

    def run() -> Generator[str, str, str]:
        return (yield "asked") + "!"

    late = LatePasses()
    begin = late.begin(source, run(), True)
    assert next(begin) == "asked"
    with pytest.raises(StopIteration):
        begin.send("sum")
    assert late.of(reader) == late.of_all() == [source]
    with pytest.raises(StopIteration) as end:
        next(late.finish(source))
    assert end.value.value == "sum!"
    assert late.of_all() == []
