"""ResNet-20 with equal weights: the losses of five steps of SGD equal PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.comm import create_communicator
from pydtnn.data import Batch
from pydtnn.kernels import Backend
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.training.trainer import Trainer

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make parity` installs it")

SHAPE = (32, 32, 3)


def test_the_loss_over_five_steps_is_equal(backend: Backend) -> None:
    from benchmarks.common.torch_twin import Twin, to_torch

    rng = np.random.default_rng(0)
    x, target = rng.normal(size=(8, *SHAPE)), rng.integers(10, size=8)
    resnet = Model(create_net("resnet20", 10, SHAPE), SHAPE, backend=backend, dtype="float64")
    twin = Twin(resnet)
    decays = [t for t in twin.parameters() if t.ndim > 1]  # biases and norms do not
    others = [t for t in twin.parameters() if t.ndim == 1]
    groups = [{"params": decays, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    exchange = AllReduce(create_communicator("serial"))
    rule = SGD(0.05, momentum=0.9, weight_decay=1e-3)
    trainer = Trainer(resnet, rule, metrics=(), exchange=exchange)
    trainer.exchange.start(resnet.buckets)
    step = Batch(x, target, np.arange(8), index=0, total=8)
    expected, losses = [], []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(twin(to_torch(x)), torch.from_numpy(target))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
        losses.append(trainer.train_step(step).means()["loss"])
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(losses, expected, rtol=1e-8)
