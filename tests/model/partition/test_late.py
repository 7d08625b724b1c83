"""Other layers run while the messages of an exchange travel."""

from __future__ import annotations

import numpy as np

from pydtnn import Mesh, Model
from pydtnn.comm import Communicator, run_threads
from pydtnn.kernels import create_backend
from pydtnn.layers import StepContext
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


def test_a_shortcut_runs_while_the_main_branch_is_exchanged_which_ends_before_it_is_read():
    for begun in run_threads(2, activities):
        names = [name for kind, name in begun if kind is Kind.FORWARD]
        start, end = [i for i, name in enumerate(names) if name == EXCHANGE]
        assert BESIDE in names[start + 1 : end]
        for kind, reader in ((Kind.FORWARD, "stage2.0.bn2"), (Kind.BACKWARD, "stage2.0.conv2")):
            names = [name for own, name in begun if own is kind]
            last = max(i for i, name in enumerate(names) if name == EXCHANGE)
            assert last < names.index(reader)
