"""Training on packed documents is training on each of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pydtnn import Mesh, Trainer
from pydtnn.comm import Communicator, Serial, run_threads
from pydtnn.data import ArrayDataset
from pydtnn.data.dataset import Dataset
from pydtnn.losses import CategoricalCrossEntropy
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.tools.sequences import PackedDataset

TOKENS, LENGTH = 11, 12
AXES = [None, {"data": 2}, {"context": 2}, {"context": 4}, {"tensor": 2}, {"pipeline": 2}]


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(TOKENS, size=n) for n in (9, 3, 2, 13, 5, 4, 7, 6, 2, 11)]


def padded() -> ArrayDataset:
    """A document in each sample, without its number: no token depends on those behind it."""
    x, y = np.zeros((10, LENGTH), "f4"), np.full((10, LENGTH), -1)
    for row, document in enumerate(documents()):
        n = len(document) - 1
        x[row, :n], y[row, :n] = document[:-1], document[1:]
    return ArrayDataset(x, y, classes=TOKENS, ignore_index=-1)


def train(
    data: Dataset, name: str, axes: dict[str, int] | None, comm: Communicator, **options: Any
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Return the weights after 3 steps on all samples, and the loss of each."""
    mesh = None if axes is None else Mesh(comm, **axes)
    net = create_net(name, TOKENS, data.input_shape, **options)
    model = Model(net, data.input_shape, backend="cpu", dtype="float64", seed=1, mesh=mesh)
    trainer = Trainer(
        model,
        SGD(0.5, momentum=0.9),
        loss=CategoricalCrossEntropy(ignore_index=-1),
        exchange=AllReduce(Serial() if mesh is None else mesh.data),
        micro_batches=2 if "pipeline" in (axes or {}) else None,
        progress=False,
    )
    history = trainer.fit(data, epochs=3, global_batch_size=len(data))
    return model.state(), history["loss"]


@pytest.mark.parametrize("name", ["gpt_nano", "llama_nano"])
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_packed_documents_train_as_each_of_them_does(name, axes):
    options = {"tied": False} if "pipeline" in (axes or {}) else {}
    expected, losses = train(padded(), name, None, Serial(), **options)
    packed = PackedDataset(documents(), LENGTH, classes=TOKENS)
    assert (len(packed), int(packed.counts.sum())) == (5, 52)
    run = partial(train, packed, name, axes, **options)
    for state, found in run_threads(max((axes or {"": 1}).values()), run):
        np.testing.assert_allclose(found, losses, rtol=1e-12)
        assert list(state) == list(expected)
        for key, value in expected.items():
            np.testing.assert_allclose(state[key], value, rtol=0, atol=1e-12, err_msg=key)
